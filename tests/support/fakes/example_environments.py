"""Environments as a user writes them, and some that break in every way there is."""

import asyncio
import contextlib
import json
import math
import os
import string
import time
import urllib.request
from pathlib import Path

from slipstream.client import AgentEnvironment, Environment, StepResult

# Replies that the check before a run has an environment judge that names no right answer.
CHECKED = ("", "ok")


class Repeat(Environment[str]):
    """The reply should be the letter of the prompt, four times."""

    def __init__(self, num_letters: int = 6) -> None:
        self._letters = list(string.ascii_lowercase[:num_letters])

    def tasks(self):
        return self._letters

    async def reset(self, task):
        self.letter = task
        return [{"role": "user", "content": task}]

    async def step(self, reply):
        words = reply.split()[:4]
        return StepResult(
            reward=words.count(self.letter) / 4, metrics={"words": len(words)}
        )


class Breaking(Repeat):
    """Judges the replies of the check before a run, so that it comes into the run."""

    def step(self, reply):
        return StepResult() if reply in CHECKED else self.judge(reply)


class Slow(Breaking):
    """Judges slowly, and not at all while the folder `hold` exists.

    The first reply that it holds makes the file `held` there.
    """

    def __init__(self, step_s: float, hold: str = "") -> None:
        super().__init__()
        self._step_s = step_s
        self._hold = hold

    async def judge(self, reply):
        await asyncio.sleep(self._step_s)
        while self._hold and os.path.isdir(self._hold):
            # The folder may go in between.
            with contextlib.suppress(FileNotFoundError):
                Path(self._hold, "held").touch(exist_ok=True)
            await asyncio.sleep(0.05)
        return await Repeat.step(self, reply)


class SlowAndVaried(Slow):
    """Judges slowly, and nearly no two replies alike."""

    async def judge(self, reply):
        await super().judge(reply)
        return StepResult(reward=sum(map(ord, reply)) % 17 / 16)


class Sabotaged(Breaking):
    """Has 25 tasks, and every fourth one breaks in its own way.

    The reply should be the letter a, four times: a model learns that in a few steps.
    """

    KINDS = ("raise", "no number", "hang", "exit", "forks", "memory")

    def __init__(self) -> None:
        super().__init__(num_letters=25)
        self._kinds = dict(zip(self._letters[::4], self.KINDS, strict=False))

    async def judge(self, reply):
        if (kind := self._kinds.get(self.letter)) is not None:
            return StepResult(reward=sabotage(kind))
        return StepResult(reward=reply.split()[:4].count("a") / 4)


class SabotagedAgent(AgentEnvironment[str]):
    """Is `Sabotaged` as an agent, which breaks when it has called the model."""

    def __init__(self) -> None:
        self._judge = Sabotaged()

    def tasks(self):
        return self._judge.tasks()

    async def run(self, task, endpoint):
        messages = await self._judge.reset(task)
        key = {
            "Authorization": f"Bearer {endpoint.api_key}",
            "Content-Type": "application/json",
        }
        body = json.dumps({"model": "any", "messages": messages}).encode()
        request = urllib.request.Request(
            f"{endpoint.base_url}/chat/completions", body, key
        )
        answer = await asyncio.to_thread(urllib.request.urlopen, request)
        # Episodes share the judge: what it keeps is set and used without a pause.
        self._judge.letter = task
        verdict = await self._judge.judge(
            json.load(answer)["choices"][0]["message"]["content"]
        )
        return verdict.reward


def sabotage(kind: str) -> float:
    """Breaks the process or the episode; returns a reward that is no number if it has to."""
    blocks = []
    match kind:
        case "raise":
            raise KeyError(kind)
        case "no number":
            return math.nan
        case "hang":
            time.sleep(3600)
        case "exit":
            os._exit(3)
        case "forks":
            while os.fork():
                time.sleep(0.002)
            os.setsid()
            time.sleep(3600)
        case "memory":
            while True:
                blocks.append(bytearray(20 << 20))
                time.sleep(0.005)
    raise AssertionError(f"sabotage of kind {kind!r} came to an end")


class Unmade(Repeat):
    def __init__(self) -> None:
        raise RuntimeError("there is no dataset")


class ThreeTurns(Repeat):
    """Three turns, of which the second alone earns what the reply is worth."""

    async def reset(self, task):
        self._turn = 0
        return await super().reset(task)

    async def step(self, reply):
        self._turn += 1
        earned = (await super().step(reply)).reward if self._turn == 2 else 0.0
        again = [{"role": "user", "content": self.letter}] if self._turn < 3 else []
        return StepResult(earned, done=not again, messages=again)
