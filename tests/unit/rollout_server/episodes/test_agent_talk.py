"""Calls of an agent through a session: limits, hang-ups, and ends, with a fake application."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from slipstream.core.errors import EnvironmentFailed
from slipstream.rollout_server.agents.recorder import Recorder
from slipstream.rollout_server.engine_interface import Sampling
from slipstream.rollout_server.episodes.agent_talk import answer_calls
from slipstream.v1 import environment_pb2, trajectory_pb2
from support.fakes.fake_engine import FakeEngine
from support.rigs.waiting import LIMIT_S, until

END = environment_pb2.AgentResult(reward=1.0)
TIMEOUT = trajectory_pb2.FAILURE_KIND_TIMEOUT


def call(
    number: int, path: str = "/v1/x", **fields: object
) -> environment_pb2.AgentCall:
    return environment_pb2.AgentCall(call=number, method="POST", path=path, **fields)


class Session:
    """What the agent says, and what it was answered."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue = asyncio.Queue()
        self.parts: list[tuple[int, bytes, bool]] = []
        self.part_error: EnvironmentFailed | None = None

    async def next_call(
        self,
    ) -> environment_pb2.AgentCall | environment_pb2.AgentResult:
        message = await self.calls.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def reply_part(self, number: int, part: environment_pb2.ReplyPart) -> None:
        await asyncio.sleep(0)
        if self.part_error is not None:
            raise self.part_error
        self.parts.append((number, part.body, part.is_last))

    async def examine(self, late: EnvironmentFailed) -> EnvironmentFailed:
        return EnvironmentFailed(late.kind, f"{late} (here)")


class Answering:
    """Answers with the body in two parts, after `may_answer`."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.closed: list[int] = []
        self.asked: list[tuple[Recorder, str]] = []

    async def answer(
        self, recorder: Recorder, http: environment_pb2.AgentCall
    ) -> AsyncIterator[environment_pb2.ReplyPart]:
        self.asked.append((recorder, http.path))
        try:
            await self.may_answer.wait()
            yield environment_pb2.ReplyPart(body=http.body, status=200)
            yield environment_pb2.ReplyPart(is_last=True)
        finally:
            self.closed.append(http.call)


def recorder(key: str) -> Recorder:
    sampling = Sampling(1.0, 1.0, 0, 10, 20, 30)
    return Recorder(FakeEngine(), key, sampling, sampled=lambda _: None)


class Talk:
    def __init__(self, timeout_s: float = LIMIT_S) -> None:
        self.session, self.answering, self.recorder = (
            Session(),
            Answering(),
            recorder("e"),
        )
        self.timeout_s = timeout_s

    def say(self, *messages: object) -> None:
        for message in messages:
            self.session.calls.put_nowait(message)

    async def run(self) -> environment_pb2.AgentResult:
        parts = self.session, self.answering, self.recorder
        return await asyncio.wait_for(
            answer_calls(*parts, timeout_s=self.timeout_s), LIMIT_S
        )

    async def with_open(
        self, *calls: object
    ) -> asyncio.Task[environment_pb2.AgentResult]:
        """The talk as it runs with calls that get no answer."""
        self.answering.may_answer.clear()
        running = asyncio.create_task(self.run())
        self.say(*calls)
        await until(lambda: len(self.answering.asked) == len(calls))
        return running


async def test_calls_are_answered_part_by_part_until_the_result() -> None:
    talk = Talk()
    running = asyncio.create_task(talk.run())
    talk.say(call(1, body=b"a"), call(2, body=b"b"))
    await until(lambda: len(talk.session.parts) == 4)
    talk.say(END)
    assert await running == END
    assert [part for part in talk.session.parts if part[0] == 1] == [
        (1, b"a", False),
        (1, b"", True),
    ]
    assert sorted(talk.answering.closed) == [1, 2]


async def test_open_calls_are_closed_at_the_result() -> None:
    talk = Talk()
    running = await talk.with_open(call(1))
    talk.say(END)
    assert await running == END
    assert talk.answering.closed == [1]


async def test_a_call_that_was_abandoned_is_closed_alone() -> None:
    talk = Talk()
    running = await talk.with_open(call(1), call(2))
    talk.say(environment_pb2.AgentCall(call=1, is_abandoned=True))
    talk.say(environment_pb2.AgentCall(call=7, is_abandoned=True))
    await until(lambda: talk.answering.closed == [1])
    talk.answering.may_answer.set()
    await until(lambda: len(talk.session.parts) == 2)
    talk.say(END)
    assert await running == END
    assert {number for number, *_ in talk.session.parts} == {2}


async def test_an_agent_that_does_nothing_fails_at_its_limit() -> None:
    with pytest.raises(
        EnvironmentFailed, match=r"within 0\.05 s, .*timeout_s \(here\)"
    ) as caught:
        await Talk(timeout_s=0.05).run()
    assert caught.value.kind == TIMEOUT


async def test_an_open_call_stops_the_clock_which_starts_again_behind_it() -> None:
    talk = Talk(timeout_s=0.2)
    talk.answering.may_answer.clear()
    running = asyncio.create_task(talk.run())
    talk.say(call(1))
    await until(lambda: talk.answering.asked)
    with pytest.raises(EnvironmentFailed, match="timeout_s"):
        await Talk(timeout_s=0.2).run()
    # An episode without a call, which began later, has failed by now.
    assert not running.done()
    talk.answering.may_answer.set()
    started_s = time.monotonic()
    with pytest.raises(EnvironmentFailed, match="timeout_s"):
        await running
    assert time.monotonic() - started_s >= 0.2


async def test_a_failure_of_the_agent_is_raised_and_its_calls_are_closed() -> None:
    talk = Talk()
    running = await talk.with_open(call(1))
    talk.say(EnvironmentFailed(trajectory_pb2.FAILURE_KIND_ENVIRONMENT, "KeyError"))
    with pytest.raises(EnvironmentFailed, match="KeyError"):
        await running
    assert talk.answering.closed == [1]


async def test_a_client_that_reads_too_slowly_loses_its_call_alone() -> None:
    talk = Talk()
    talk.session.part_error = EnvironmentFailed(TIMEOUT, "no answer to reply_part")
    running = asyncio.create_task(talk.run())
    talk.say(call(1))
    await until(lambda: talk.answering.closed == [1])
    talk.session.part_error = None
    talk.say(call(2), END)
    assert await running == END


async def test_a_lost_stream_ends_the_episode() -> None:
    talk = Talk()
    talk.session.part_error = EnvironmentFailed(
        trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE, "the stream is over"
    )
    talk.say(call(1))
    with pytest.raises(EnvironmentFailed, match="the stream is over"):
        await talk.run()


async def test_a_cancelled_talk_leaves_nothing_open() -> None:
    talk = Talk()
    running = await talk.with_open(call(1))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert talk.answering.closed == [1]


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_number_that_was_used_ends_the_episode(number: int) -> None:
    talk = Talk()
    talk.answering.may_answer.clear()
    talk.say(call(1), call(2), call(number))
    with pytest.raises(EnvironmentFailed, match=f"counted up, got {number} behind 2"):
        await talk.run()
    assert sorted(talk.answering.closed) == [1, 2]
