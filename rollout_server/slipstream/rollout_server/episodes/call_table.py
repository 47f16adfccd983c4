"""The open calls of one stream, each with its answer, or with the answers of an agent.

Consumes: commands, answers from the stream. Produces: the answer to each command.
Waits for: the answer. Unblocked by: the answer, the limit of the call, or the end of the stream.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

from slipstream.core.errors import EnvironmentFailed
from slipstream.v1 import environment_pb2, trajectory_pb2

MAX_MESSAGE_CHARACTERS = 500
# Calls of one agent that may wait to be taken; a worker opens far fewer.
_MAX_WAITING_CALLS = 1024

# The answers to a command that has several; a failure is the last of them.
Answers: TypeAlias = "asyncio.Queue[environment_pb2.WorkerMessage | EnvironmentFailed]"


class CallTable:
    """The open calls of one stream, until `end`; afterwards every call fails."""

    def __init__(
        self,
        send: Callable[[environment_pb2.WorkerCommand], None],
        numbers: Iterator[int] | None = None,
    ) -> None:
        """`send` puts a command on the stream at once; tables of one stream share `numbers`."""
        self._send = send
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._open: dict[int, asyncio.Future[environment_pb2.WorkerMessage]] = {}
        self._followed: dict[int, Answers] = {}
        self._end: EnvironmentFailed | None = None

    @property
    def is_open(self) -> bool:
        """Whether its stream still takes calls."""
        return self._end is None

    async def call(
        self, command: environment_pb2.WorkerCommand, *, timeout_s: float
    ) -> environment_pb2.WorkerMessage:
        """Sends `command` and waits for its answer; EnvironmentFailed when there is none."""
        number = self.notify(command)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[environment_pb2.WorkerMessage] = loop.create_future()
        self._open[number] = answer
        try:
            async with asyncio.timeout(timeout_s if math.isfinite(timeout_s) else None):
                message = await answer
        except TimeoutError:
            what = command.WhichOneof("command")
            rule = ", the environment's timeout_s" if what in ("reset", "step") else ""
            raise EnvironmentFailed(
                trajectory_pb2.FAILURE_KIND_TIMEOUT,
                f"no answer to {what} within {timeout_s:g} s{rule}",
            ) from None
        finally:
            self._open.pop(number, None)
        return checked(message)

    def follow(self, command: environment_pb2.WorkerCommand) -> Answers:
        """Sends the command to follow an agent; returns the queue of its calls and its result.

        It holds 1024 answers; where more come, a failure is the last.
        """
        answers: Answers = asyncio.Queue(_MAX_WAITING_CALLS)
        self._followed[self.notify(command)] = answers
        return answers

    def notify(self, command: environment_pb2.WorkerCommand) -> int:
        """Sends `command` without waiting for its answer; returns the number of the call."""
        if self._end is not None:
            raise EnvironmentFailed(self._end.kind, str(self._end))
        command.call_id = next(self._numbers)
        self._send(command)
        return command.call_id

    def answered(self, message: environment_pb2.WorkerMessage) -> None:
        """Takes an answer from the stream; drops it if its caller no longer waits."""
        answers = self._followed.get(message.call_id)
        if answers is not None:
            if not message.HasField("agent_call"):
                del self._followed[message.call_id]
            _put(answers, message)
            return
        answer = self._open.get(message.call_id)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def end(self, kind: trajectory_pb2.FailureKind, message: str) -> None:
        """Fails every open and every later call: the stream is over."""
        if self._end is not None:
            return
        self._end = EnvironmentFailed(kind, message)
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(EnvironmentFailed(kind, message))
        for answers in self._followed.values():
            _put(answers, EnvironmentFailed(kind, message))


def checked(message: environment_pb2.WorkerMessage) -> environment_pb2.WorkerMessage:
    """Returns an answer; raises EnvironmentFailed where it is a failure."""
    if message.WhichOneof("message") == "failure":
        failure = message.failure
        raise EnvironmentFailed(_kind(failure), failure.message[:MAX_MESSAGE_CHARACTERS])
    return message


def misused(cause: str) -> EnvironmentFailed:
    """Returns the error of an environment that does not keep to the protocol."""
    return EnvironmentFailed(
        trajectory_pb2.FAILURE_KIND_ENVIRONMENT, cause[:MAX_MESSAGE_CHARACTERS]
    )


def _put(answers: Answers, answer: environment_pb2.WorkerMessage | EnvironmentFailed) -> None:
    """Puts an answer into a queue; where it finds no room, a failure takes the last place."""
    if answers.full():
        return
    if answers.qsize() == answers.maxsize - 1 and not isinstance(answer, EnvironmentFailed):
        answer = misused(f"{answers.maxsize} calls of an agent wait, it makes too many")
    answers.put_nowait(answer)


def _kind(failure: trajectory_pb2.Failure) -> trajectory_pb2.FailureKind:
    """Returns the kind of `failure`; ENVIRONMENT where the message has none or an unknown one."""
    if failure.kind and failure.kind in trajectory_pb2.FailureKind.values():
        return failure.kind
    return trajectory_pb2.FAILURE_KIND_ENVIRONMENT
