"""Guess a number by "higher" and "lower": a small task of several turns."""

import random
import re

from slipstream.client.environment import Environment, Message, StepResult


class GuessNumber(Environment[int]):
    """The model has `max_guesses` replies to find a number from 1 to `high`.

    The last integer of a reply is the guess; a reply without one counts as a wrong guess. Reward 1
    for the first guess, less by 1 / `max_guesses` for every further one, 0 when it is not found.
    """

    def __init__(self, high: int = 20, max_guesses: int = 5, seed: int = 0) -> None:
        """Raises ValueError, which names the argument that cannot work."""
        if high < 2:
            raise ValueError(f"high must be at least 2, got {high}")
        if max_guesses < 1:
            raise ValueError(f"max_guesses must be at least 1, got {max_guesses}")
        self._high, self._max_guesses = high, max_guesses
        self._numbers = random.Random(seed).sample(range(1, high + 1), high)
        self._number = 0
        self._guesses = 0

    def tasks(self) -> list[int]:
        """Returns the numbers from 1 to `high` in a random order."""
        return self._numbers

    def reset(self, task: int) -> list[Message]:
        """Asks for a first guess."""
        self._number, self._guesses = task, 0
        return [Message("user", f"Guess my number from 1 to {self._high}.")]

    def step(self, reply: str) -> StepResult:
        """Answers "higher" or "lower", or ends the game."""
        self._guesses += 1
        found = re.findall(r"\d{1,9}", reply)
        guess = int(found[-1]) if found else None
        if guess == self._number:
            reward = 1 - (self._guesses - 1) / self._max_guesses
            return StepResult(reward, metrics={"guesses": self._guesses, "found": 1})
        if self._guesses == self._max_guesses:
            return StepResult(0.0, metrics={"guesses": self._guesses, "found": 0})
        hint = "higher" if guess is not None and guess < self._number else "lower"
        hint = "a number" if guess is None else hint
        return StepResult(done=False, messages=[Message("user", hint)])
