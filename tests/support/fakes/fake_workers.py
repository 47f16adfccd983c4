"""The rollout server's end of environment workers, and environments of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import numpy as np
from slipstream.client import Environment, Message, Reply, ResetResult, StepResult
from slipstream.protocol.access.security import Credentials, create_server
from slipstream.v1 import environment_pb2 as pb
from slipstream.v1 import environment_pb2_grpc

TOKEN = "t" * 32
# The line is that of `support.rigs.waiting`, which workers that load this module cannot import.
LIMIT_S = 120.0
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


class WorkerStream:
    """One attached worker: sends commands, gives answers by call."""

    def __init__(
        self, requests: AsyncIterator, context: grpc.aio.ServicerContext
    ) -> None:
        self._requests = requests
        self._context = context
        self._answers: dict[int, asyncio.Future[pb.WorkerMessage]] = {}
        self._ids = itertools.count(1)
        self.hello: pb.WorkerHello | None = None
        self.closed = asyncio.Event()

    async def read(self) -> None:
        self.hello = (await anext(self._requests)).hello
        async for message in self._requests:
            self._answers.pop(message.call_id).set_result(message)

    async def start(self, **command: object) -> asyncio.Future[pb.WorkerMessage]:
        """Sends a command; the answer comes in the future."""
        call_id = next(self._ids)
        answer = asyncio.get_running_loop().create_future()
        self._answers[call_id] = answer
        await self._context.write(pb.WorkerCommand(call_id=call_id, **command))
        return answer

    async def call(self, **command: object) -> pb.WorkerMessage:
        async with asyncio.timeout(LIMIT_S):
            return await (await self.start(**command))

    async def load(
        self, reference: str, args_json: str = "", search_path: str = ""
    ) -> pb.WorkerMessage:
        spec = pb.EnvironmentSpec(
            reference=reference, args_json=args_json, search_path=search_path
        )
        return await self.call(load=pb.LoadCommand(spec=spec))

    async def reset(
        self, key: str, task_index: int = 0, seed: int = 0
    ) -> pb.WorkerMessage:
        return await self.call(
            reset=pb.ResetCommand(episode_key=key, task_index=task_index, seed=seed)
        )

    async def step(self, key: str, reply: str) -> pb.WorkerMessage:
        return await self.call(step=pb.StepCommand(episode_key=key, reply=reply))


class WorkerServer(environment_pb2_grpc.WorkerServiceServicer):
    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/worker.sock"
        self._attached: asyncio.Queue[WorkerStream] = asyncio.Queue()
        self._server = create_server(Credentials(token=TOKEN))

    async def __aenter__(self) -> WorkerServer:
        environment_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def attached(self) -> WorkerStream:
        return await asyncio.wait_for(self._attached.get(), LIMIT_S)

    async def Attach(
        self, requests: AsyncIterator, context: grpc.aio.ServicerContext
    ) -> None:  # noqa: N802
        stream = WorkerStream(requests, context)
        reader = asyncio.create_task(stream.read())
        self._attached.put_nowait(stream)
        await stream.closed.wait()
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader


@contextlib.asynccontextmanager
async def worker_process(
    *arguments: str, token: str = TOKEN
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs the worker program; it is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "slipstream.client.worker",
        *arguments,
        env={"SLIPSTREAM_TOKEN": token, "PATH": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


class Good(Environment[str]):
    def __init__(self, words: tuple[str, ...] = ("one", "two", "three")) -> None:
        self.words = words
        self.turns = 0

    def tasks(self) -> tuple[str, ...]:
        return self.words

    async def reset(self, task: str) -> list[dict[str, str]]:
        self.turns = 0
        return [{"role": "user", "content": f"{task} {self.seed}"}]

    async def step(self, reply: str) -> StepResult:
        self.turns += 1
        if self.turns == 1:
            return StepResult(
                0.25, done=False, messages=[{"role": "user", "content": reply}]
            )
        return StepResult(
            0.5, metrics={"turns": self.turns, "truncated": self.truncated}
        )


class Plain(Environment[int]):
    """Plain methods, tasks without end, and prints."""

    def tasks(self) -> Iterator[int]:
        return itertools.count(10)

    def reset(self, task: int) -> list[Message]:
        print("half a character: \ud83d")
        return [Message("system", "be brief"), Message("user", str(task))]

    def step(self, reply: str) -> StepResult:
        return StepResult(True)


class Calculator(Environment[int]):
    """Names a tool, tells what it was given, and takes the tool back when it is not called."""

    def tasks(self) -> list[int]:
        return [1]

    def reset(self, task: int) -> ResetResult:
        return ResetResult([Message("user", "add")], tools=[ADD])

    def step(self, reply: Reply) -> StepResult:
        message = Message("user", f"{reply}|{reply.content}|{reply.reasoning}")
        results = [
            Message("tool", repr(call.arguments), call.id) for call in reply.tool_calls
        ]
        tools = None if reply.tool_calls else []
        return StepResult(done=False, messages=[message, *results], tools=tools)


class Misbehaving(Environment[str]):
    """Does in `reset` what the task says, and in `step` what the reply says."""

    def tasks(self) -> list[str]:
        return ["start", "raise", "no messages", "wrong message", "text", "surrogate"]

    def reset(self, task: str) -> object:
        match task:
            case "raise":
                raise KeyError("reset")
            case "no messages":
                return []
            case "wrong message":
                return [{"role": "user", "content": 3}]
            case "text":
                return "hello"
            case "surrogate":
                return [Message("user", "\ud800")]
        return [Message("user", "go on")]

    async def fail(self, cause: str) -> None:
        raise ValueError(cause)

    async def step(self, reply: str) -> object:
        match reply:
            case "raise":
                raise ValueError("first line\nsecond line")
            case "no text":
                raise type("Mute", (Exception,), {"__str__": lambda self: 1 / 0})
            case "file":
                raise OSError(f"no file {os.fsdecode(b'a' + bytes([255]))}")
            case "several":
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.fail("first"))
                    group.create_task(self.fail("second"))
            case "end":
                next(iter(()))
            case "much":
                raise ValueError("x" * 1000)
            case "panic":
                # Errors of Rust's libraries and of pytest.fail are likewise.
                raise type("Panic", (BaseException,), {})("index out of range")
            case "exit":
                sys.exit(3)
            case "interrupt":
                raise KeyboardInterrupt
            case "cancel":
                raise asyncio.CancelledError
            case "hang":
                await asyncio.Event().wait()
            case "nothing":
                return None
            case "no messages":
                return StepResult(done=False)
            case "forgot done":
                return StepResult(messages=[Message("user", "and?")])
            case "not done":
                return StepResult(0.5, [{"role": "user", "content": "and?"}])  # type: ignore[arg-type]
            case "metric":
                return StepResult(1.0, metrics={"size": math.inf})
            case "no name":
                return StepResult(1.0, metrics={"": 1.0})
            case "limit":
                self.max_reply_tokens = 3
                return StepResult(1.0)
            case "two names":
                return StepResult(1.0, metrics={1: 1.0, "1": 2.0})  # type: ignore[dict-item]
            case "half a name":
                return StepResult(1.0, metrics={"a\ud800b": 1.0})
            case "several ends":
                return StepResult(1.0, done=np.array([True, False]))  # type: ignore[arg-type]
            case "metrics":
                return StepResult(1.0, metrics=[("size", 1)])  # type: ignore[arg-type]
            case "picture":
                message = {"role": "user", "content": "3", "picture": "a"}
                return StepResult(done=False, messages=[message])
            case "call of a user":
                message = {"role": "user", "content": "3", "tool_call_id": "a"}
                return StepResult(done=False, messages=[message])
            case "number of a call":
                message = {"role": "tool", "content": "3", "tool_call_id": 1}
                return StepResult(done=False, messages=[message])
            case "tools of a last step":
                return StepResult(tools=[])
            case "tools without a type":
                tools = [{"name": "look"}]
                return StepResult(
                    done=False, messages=[Message("user", "and?")], tools=tools
                )
            case "long":
                return StepResult("x" * 10_000)  # type: ignore[arg-type]
            case "print":
                print("printed by the environment")
        rewards = {
            "nan": math.nan,
            "inf": math.inf,
            "none": None,
            "text": "1",
            "huge": 10**400,
        }
        return StepResult(rewards.get(reply, 1.0))  # type: ignore[arg-type]


class Empty(Environment[int]):
    def tasks(self) -> list[int]:
        return []


class NoEnvironment:
    """An object that is no Environment."""
