"""Word problems of two steps, whose answers a small model explains in some hundred tokens."""

import random
import re

from slipstream.client import Environment, StepResult

NAMES = [
    "Anna",
    "Ben",
    "Carl",
    "Dora",
    "Eve",
    "Finn",
    "Gina",
    "Hugo",
    "Iris",
    "Jack",
    "Kate",
    "Liam",
]
THINGS = ["apples", "books", "coins", "marbles", "pens", "cards", "shells", "stamps"]
PROBLEM = (
    "{0} has {2} {1} and buys {3} more, then gives away {4}. How many {1} does {0} have now? "
    "Explain step by step."
)
NUM_TASKS = 4000
MAX_NUMBER = 40


class WordProblems(Environment[list[str | int]]):
    """Rewards a reply whose last number is the answer."""

    def tasks(self) -> list[list[str | int]]:
        """Returns name, thing and the three numbers of each problem; the same in every run."""
        chosen = random.Random(1)
        found = list[list[str | int]]()
        for _ in range(NUM_TASKS):
            has = chosen.randint(2, MAX_NUMBER)
            buys = chosen.randint(2, MAX_NUMBER)
            gives = chosen.randint(1, has + buys - 1)
            found.append([chosen.choice(NAMES), chosen.choice(THINGS), has, buys, gives])
        return found

    def reset(self, task: list[str | int]) -> list[dict[str, str]]:
        """Returns the problem as a user's message."""
        has, buys, gives = (int(number) for number in task[2:])
        self.answer = str(has + buys - gives)
        return [{"role": "user", "content": PROBLEM.format(*task)}]

    def step(self, reply: str) -> StepResult:
        """Rewards 1 if the last number of the reply is the answer, else 0."""
        found = re.findall(r"\d+", reply)
        return StepResult(reward=float(found[-1:] == [self.answer]))
