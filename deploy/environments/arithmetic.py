"""Sums whose answers are checked exactly: the smallest task that a small language model learns."""

import hashlib
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field
from slipstream.client.environment import Environment, Message, StepResult, answer_of
from slipstream.core.arguments import Count, checked
from slipstream.core.errors import ConfigError
from slipstream.environments.answers import final_of, number_of, numbers, plain

OPERATIONS = ("+", "-", "*")
MAX_DIGITS = 9
# One task in this many is held out.
HELDOUT_ONE_IN = 10
# The end of a reply that names two numbers, or a fraction: it has no answer.
_EITHER = re.compile(r"\d\S{0,80}\s*(?:\bor\b|/)\s*\S{0,80}\d\D*\Z")


class Addition(NamedTuple):
    """One task: `left operation right`."""

    left: int
    operation: str
    right: int

    @property
    def answer(self) -> int:
        """The correct result."""
        match self.operation:
            case "+":
                return self.left + self.right
            case "-":
                return self.left - self.right
            case _:
                return self.left * self.right

    @property
    def is_heldout(self) -> bool:
        """Whether a hash of the operation and the sorted operands holds the task out."""
        operands = sorted((self.left, self.right))
        key = f"{operands[0]}{self.operation}{operands[1]}".encode()
        return hashlib.blake2b(key, digest_size=8).digest()[0] % HELDOUT_ONE_IN == 0

    def __str__(self) -> str:
        return f"{self.left} {self.operation} {self.right}"


class Arithmetic(Environment[Addition]):
    """Asks for `left operation right`, with operands of `digits` digits.

    The last number of a reply is its answer: the reward is 1 for the right one, `format_credit` for
    a wrong one, else 0. Differences are never negative. A hash of the operands holds out a tenth of
    all tasks, whatever the seed is.
    """

    @checked
    def __init__(
        self,
        digits: Annotated[int, Field(ge=1, le=MAX_DIGITS)] = 2,
        operations: Sequence[str] = ("+", "-"),
        num_tasks: Count | None = None,
        split: Literal["train", "heldout"] = "train",
        seed: int = 0,
        *,
        format_credit: float = 0.1,
    ) -> None:
        """`num_tasks` is the number of different tasks; None means an endless iterator of tasks.

        Raises ConfigError for arguments that cannot work.
        """
        if not operations or not set(operations) <= set(OPERATIONS):
            raise ConfigError(f"operations must be some of {OPERATIONS}, got {operations}")
        if not 0 <= format_credit < 1:
            raise ConfigError(f"format_credit must be from 0 to below 1, got {format_credit}")
        self._digits = digits
        self._operations = tuple(operations)
        self._is_heldout = split == "heldout"
        self._seed = seed
        self._format_credit = format_credit
        self._tasks = None if num_tasks is None else self._draw_different(num_tasks)
        self._task = Addition(0, "+", 0)

    def tasks(self) -> list[Addition] | Iterator[Addition]:
        """Returns a list of `num_tasks` tasks, or an endless iterator with a fixed seed."""
        return self._draw() if self._tasks is None else self._tasks

    def reset(self, task: Addition) -> list[Message]:
        """Returns the prompt that asks for the result of the task."""
        self._task = task
        self.right_reply = self.expected_answer = str(task.answer)
        return [Message("user", f"What is {task}? Reply with the number only.")]

    def step(self, reply: str) -> StepResult:
        """Returns the reward for the reply's answer."""
        answer = last_number(answer_of(reply))
        is_right = answer == self._task.answer
        reward = 1.0 if is_right else self._format_credit if answer is not None else 0.0
        return StepResult(reward, metrics={"right": is_right, "well_formed": answer is not None})

    def _draw(self) -> Iterator[Addition]:
        generator = random.Random(self._seed)
        while True:
            operation = generator.choice(self._operations)
            left = self._operand(generator)
            right = self._operand(generator)
            if operation == "-":
                right, left = sorted((left, right))
            task = Addition(left, operation, right)
            if task.is_heldout == self._is_heldout:
                yield task

    def _draw_different(self, num_tasks: int) -> list[Addition]:
        tasks: dict[Addition, None] = {}
        for task in itertools.islice(self._draw(), 20 * num_tasks + 2000):
            tasks[task] = None
            if len(tasks) == num_tasks:
                return list(tasks)
        raise ValueError(f"num_tasks must be at most {len(tasks)} here, got {num_tasks}")

    def _operand(self, generator: random.Random) -> int:
        # Drawn also where there is one length alone: tasks are those of earlier runs.
        digits = generator.randint(self._digits, self._digits)
        return generator.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def last_number(text: str) -> int | float | None:
    """Returns the number that a reply says last, or None: also in "6 or 7", and in a fraction."""
    answer = final_of(text)
    answer = plain(answer if numbers(answer) else text)
    last_numbers = numbers(answer)[-1:]
    return (
        number_of(last_numbers[0]) if last_numbers and not _EITHER.search(answer[-160:]) else None
    )
