"""Environments that behave badly, loaded by worker processes."""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
import urllib.request
from pathlib import Path

import numpy
from slipstream.client import AgentEnvironment, Environment, StepResult


class Good(Environment):
    """Rewards any reply; says which variables it sees."""

    def tasks(self):
        return range(5)

    def reset(self, task):
        return [{"role": "user", "content": "a b"}]

    def step(self, reply):
        return StepResult(reward=0.5, metrics={"variables": float(len(os.environ))})


class Loud(Good):
    """Prints 50 lines a step."""

    def step(self, reply):
        for number in range(50):
            print(f"line {number} of {reply}")
        sys.stdout.flush()
        return StepResult(reward=0.5)


class Hanging(Good):
    """Never answers a step, but lets others go on."""

    async def step(self, reply):
        await asyncio.sleep(3600)


class Stuck(Good):
    """Blocks its whole process in the first episode of task 0."""

    def reset(self, task):
        if task == 0:
            time.sleep(3600)
        return super().reset(task)


class Exiting(Good):
    """Ends its process in a step of task 0."""

    def __init__(self):
        self.task = None

    def reset(self, task):
        self.task = task
        return super().reset(task)

    def step(self, reply):
        if self.task == 0:
            os._exit(7)
        return super().step(reply)


class Drawing(Good):
    """Says what a worker draws, and what it has of the process that forked it."""

    async def reset(self, task):
        opened = Path("/proc/self/fd")
        targets = []
        for name in os.listdir(opened):
            with contextlib.suppress(OSError):
                targets.append(os.readlink(opened / name))
        # A product that the threads of a library share, which a fork does not have.
        square = numpy.ones((300, 300))
        words = {
            "product": float((square @ square).sum()),
            "numbers": {
                "random": random.random(),
                "numpy": float(numpy.random.random()),
            },
            "sockets": sum(target.startswith("socket:") for target in targets),
            "module": sys.modules["__main__"].__spec__.name,
            "secrets": [
                name for name in ("HF_TOKEN", "SLIPSTREAM_TOKEN") if name in os.environ
            ],
        }
        return [{"role": "user", "content": json.dumps(words)}]


class Greedy(Good):
    """Takes memory in a step until it is stopped."""

    def step(self, reply):
        memory = []
        while True:
            memory.append(bytearray(20 << 20))
            time.sleep(0.02)


class Scattering(Good):
    """Starts processes that leave its session and lose their parents; says which."""

    def reset(self, task):
        reading_end, tell = os.pipe()
        if os.fork() == 0:
            os.setsid()
            for _ in range(2):
                if os.fork() == 0:
                    os.setsid()
                    os.write(tell, f"{os.getpid()} ".encode())
                    time.sleep(3600)
            os._exit(0)
        os.wait()
        os.close(tell)
        pids = b""
        while pids.count(b" ") < 2:
            pids += os.read(reading_end, 100)
        os.close(reading_end)
        return [{"role": "user", "content": pids.decode()}]

    def step(self, reply):
        os._exit(0)


class Unloadable(Environment):
    def __init__(self):
        raise RuntimeError("the data set is missing")


class DiesWhileLoading(Environment):
    def __init__(self):
        os.kill(os.getpid(), signal.SIGKILL)


class DiesAtFirst(Good):
    """Is killed while it loads for the first time, as by a kernel whose memory is full."""

    def __init__(self, mark):
        mark = Path(mark)
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__()


class Curious(Good):
    """Says which descriptors it has, and what is in its environment."""

    def reset(self, task):
        facts = {
            name: os.readlink(f"/proc/self/fd/{name}")
            for name in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{name}")
        }
        return [
            {"role": "user", "content": json.dumps([facts, dict(os.environ), sys.argv])}
        ]


class CallsTheModel(AgentEnvironment[int]):
    def tasks(self):
        return [1, 2, 3]

    def run(self, task, endpoint):
        key = {"Authorization": f"Bearer {endpoint.api_key}"}
        request = urllib.request.Request(
            f"{endpoint.base_url}/chat/completions", b"{}", key
        )
        with urllib.request.urlopen(request):
            return 1.0


class LacksAPackage(CallsTheModel):
    def run(self, task, endpoint):
        import no_such_package  # noqa: F401


class CallsNobody(CallsTheModel):
    async def run(self, task, endpoint):
        return 1.0


class NeverCalls(CallsTheModel):
    async def run(self, task, endpoint):
        await asyncio.Event().wait()
