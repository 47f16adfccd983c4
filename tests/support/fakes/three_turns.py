"""An environment of three turns, of which only the second decides."""

import random

from slipstream.client import Environment, Message, StepResult


class ThreeTurns(Environment[int]):
    """The reward of the second reply is its share of the letter that the first prompt shows.

    The first and the third turn earn `noise` or -`noise` by chance, whatever the replies are.
    """

    def __init__(self, noise: float = 0.0) -> None:
        self._noise = noise

    def tasks(self) -> range:
        return range(6)

    def reset(self, task: int) -> list[Message]:
        self._letter, self._turn = "abcdef"[task], 0
        return [Message("user", self._letter)]

    def step(self, reply: str) -> StepResult:
        self._turn += 1
        if self._turn != 2:
            earned = random.choice((-self._noise, self._noise))
            again = [] if self._turn == 3 else [Message("user", self._letter)]
            return StepResult(earned, done=self._turn == 3, messages=again)
        share = reply.split()[:4].count(self._letter) / 4
        again = [Message("user", self._letter)]
        return StepResult(share, done=False, messages=again, metrics={"second": share})
