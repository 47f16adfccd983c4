"""The work of whole systems side by side: prompts, lengths of replies and rewards.

Our environment's workers and the peer's programs import this module. The first `fixed` replies all
have `tokens` tokens; those behind them have lognormal lengths, as `reply_length` draws.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.client import Environment, StepResult

from benchmarks.common.workloads import reply_length

VARIABLE = "WHOLE_SYSTEMS_WORK"
# Set where requests must carry no seed.
NO_SEEDS = "WHOLE_SYSTEMS_NO_SEEDS"
# Tasks, each with a prompt of its own.
TASKS = 4000
_POLL_S = 0.1


@dataclass(frozen=True)
class Work:
    """What every system is given. A `sigma` of sqrt(ln 2) is a coefficient of variation of 1."""

    fixed: int
    tokens: int = 512
    median: float = 256.0
    sigma: float = 0.8326
    longest: int = 1024
    # The chat template adds two more tokens.
    prompt_words: int = 126
    words: int = 150_000

    @classmethod
    def of_environ(cls) -> Work:
        return cls(**json.loads(os.environ[VARIABLE]))

    def environ(self) -> dict[str, str]:
        """Returns the variable that tells a peer's program of this work."""
        return {VARIABLE: json.dumps(asdict(self))}

    def length(self, place: int) -> int:
        """Returns the tokens of the reply that is drawn at `place`, counted from 0."""
        if place < self.fixed:
            return self.tokens
        return reply_length(place - self.fixed, self.median, self.sigma, self.longest)

    def prompt(self, task: int) -> list[dict[str, str]]:
        generator = random.Random(task)
        words = (f"w{generator.randrange(self.words)}" for _ in range(self.prompt_words))
        return [{"role": "user", "content": " ".join(words)}]


def reward(reply: str) -> float:
    """Returns 1 for about half of the replies, whatever their length."""
    return float(zlib.crc32(reply.encode()) & 1)


def touch_and_wait(asked: Path, gate: Path, limit_s: float) -> None:
    """Says by the file `asked` that a program is ready; waits until `gate` exists."""
    asked.touch()
    until = time.monotonic() + limit_s
    while not gate.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{gate} did not appear within {limit_s:g} s")
        time.sleep(_POLL_S)


class Replies(Environment[int]):
    """The work as an environment in one process; its episodes wait for `gate`.

    Those of a run's check do not, which plays some in a process of its own before anything is
    loaded, nor does the first one, with which a server tries it. All later ones touch `asked`.
    """

    # Number of lengths drawn so far, shared by the copies that the episodes run on.
    _drawn = 0

    def __init__(self, work: dict[str, Any], asked: str, gate: str) -> None:
        self._work = Work(**work)
        self._asked, self._gate = Path(asked), Path(gate)

    def tasks(self) -> range:
        return range(TASKS)

    async def reset(self, task: int) -> list[dict[str, str]]:
        """Sets the next length: members of a group differ in it once lengths are lognormal."""
        place = Replies._drawn
        Replies._drawn += 1
        self.max_reply_tokens = self._work.length(place)
        if place and "--check" not in sys.argv:
            self._asked.touch()
            while not self._gate.exists():
                await asyncio.sleep(_POLL_S)
        return self._work.prompt(task)

    def step(self, reply: str) -> StepResult:
        return StepResult(reward=reward(reply))
