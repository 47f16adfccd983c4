"""A recorder of an agent's calls over a fake engine, without any HTTP application."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator

import pytest
from slipstream.core.types import PolicyVersion
from slipstream.rollout_server.agents.conversations import MessageKey
from slipstream.rollout_server.agents.recorder import (
    CHAT_PATH,
    RESPONSES_PATH,
    Recorder,
)
from slipstream.rollout_server.agents.request_rules import Refusal, ServedCall
from slipstream.rollout_server.engine_interface import (
    Generation,
    GenerationFailed,
    Sampling,
    TextOptions,
    TextPart,
)
from slipstream.v1.environment_pb2 import AgentCall
from support.fakes.fake_engine import FakeEngine
from support.rigs.waiting import LIMIT_S

SAMPLING = Sampling(1.0, 1.0, 0, 10, 20, 30, max_total_tokens=45, max_branches=4)


class Calls:
    """Calls of one episode, by hand."""

    def __init__(self, sampling: Sampling = SAMPLING) -> None:
        self.engine = FakeEngine()
        self.engine.version = PolicyVersion(0, 1)
        self.engine.running.set()
        self.told: list[int] = []

        def sampled(generation: Generation) -> None:
            self.told.append(len(generation.token_ids))

        self.recorder = Recorder(self.engine, "e", sampling, sampled=sampled)
        self.number = 0

    def open(self, path: str = CHAT_PATH) -> ServedCall:
        self.number += 1
        return self.recorder.open(
            AgentCall(call=self.number, method="POST", path=path), path
        )

    async def begin(self, opened: ServedCall, *texts: str) -> list[int]:
        keys = [
            MessageKey("assistant" if text[0] == "r" else "user", text)
            for text in texts
        ]
        turn_found = self.recorder.find(opened, "", keys)
        count = len(texts) - (turn_found.num_messages if turn_found else 0)
        return await self.recorder.begin(
            opened, turn_found.turn if turn_found else None, [9] * count
        )

    async def sample(self, opened: ServedCall, max_tokens: int = 10):
        parts = self.recorder.sample(opened, max_tokens, TextOptions())
        return [part async for part in parts][-1].generation

    async def talk(self, *texts: str, reply: str, path: str = CHAT_PATH) -> list[int]:
        """A whole call with its answer; returns the tokens of the reply."""
        opened = self.open(path)
        await self.begin(opened, *texts)
        generation = await self.sample(opened)
        self.answer(opened, reply)
        return generation.token_ids.tolist()

    def answer(self, opened: ServedCall, text: str) -> None:
        opened.status = 200
        opened.reply = {"role": "assistant", "content": text}
        opened.body += json.dumps({"id": text, "output": [opened.reply]}).encode()
        self.recorder.close(opened)


async def test_a_call_is_recorded_and_continued() -> None:
    calls = Calls()
    reply = await calls.talk("u1", reply="r1")
    assert await calls.begin(calls.open(), "u1", "r1", "u2") == [9, *reply, 9]
    assert calls.told == [len(reply)]


WHOLE = b'{"id": "1", "output": [{"role": "assistant", "content": "r1"}]}'
HALF = WHOLE[:19]


@pytest.mark.parametrize(
    ("status", "body", "is_closed"),
    [(500, WHOLE, True), (200, HALF, True), (200, HALF, False)],
    ids=["error", "hangs up", "half"],
)
async def test_no_error_and_no_half_of_an_answer_is_known(
    status, body, is_closed
) -> None:
    calls = Calls()
    first = calls.open(RESPONSES_PATH)
    await calls.begin(first, "u1")
    await calls.sample(first)
    first.status = status
    first.reply = {"role": "assistant", "content": "r1"}
    first.body += body
    if is_closed:
        calls.recorder.close(first)
    assert await calls.begin(calls.open(), "u1", "r1", "u2") == [9, 9, 9]
    assert calls.recorder._unread == ([] if is_closed else [first])


async def test_a_call_waits_for_room_that_another_may_leave() -> None:
    calls = Calls(dataclasses.replace(SAMPLING, max_total_tokens=50))
    first = calls.open()
    second = calls.open()
    third = calls.open()
    for opened in (first, second):
        await calls.begin(opened, *["u"] * 8)
    waiting = asyncio.create_task(calls.begin(third, *["u"] * 8))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await calls.sample(first)
    await asyncio.wait_for(waiting, LIMIT_S)
    assert third.max_tokens == 10


@pytest.mark.parametrize("way", ["close", "cancel"])
async def test_a_call_that_waits_for_room_can_be_ended(way: str) -> None:
    calls = Calls()
    opened = [calls.open() for _ in range(3)]
    for call in opened[:2]:
        await calls.begin(call, *["u"] * 8)
    waiting = asyncio.create_task(calls.begin(opened[2], *["u"] * 8))
    await asyncio.sleep(0.01)
    if way == "cancel":
        calls.recorder.cancel()
    else:
        calls.recorder.close(opened[2])
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(Refusal, match="the episode is over"):
            await waiting
    assert not calls.recorder.is_truncated


async def test_a_call_that_was_closed_before_its_sample_samples_nothing() -> None:
    calls = Calls()
    opened = calls.open()
    await calls.begin(opened, "u1")
    calls.recorder.close(opened)
    with pytest.raises(Refusal, match="the client has hung up"):
        await calls.sample(opened)
    assert calls.told == []


async def test_a_sample_that_nobody_reads_is_ended_and_recorded() -> None:
    calls = Calls()
    calls.engine.limit = 2
    opened = calls.open()
    await calls.begin(opened, "u1")
    reading = calls.recorder.sample(opened, 10, TextOptions())
    await calls.engine.wait_tokens(2)
    await reading.aclose()
    calls.recorder.close(opened)
    await asyncio.wait_for(calls.recorder.settled(), LIMIT_S)
    (branch,) = calls.recorder.conversations.branches
    assert branch.run_lengths == [1, 2]
    assert calls.told == [2]


async def test_a_call_that_the_engine_could_not_serve_leaves_its_branch_free() -> None:
    calls = Calls()
    await calls.talk("u1", reply="r1")
    calls.engine.fail_with = "no"
    second = calls.open()
    await calls.begin(second, "u1", "r1", "u2")
    with pytest.raises(GenerationFailed, match="no"):
        await calls.sample(second)
    calls.recorder.close(second)
    calls.engine.fail_with = None
    third = calls.open()
    await calls.begin(third, "u1", "r1", "u2")
    assert third.call.is_append


async def test_no_more_tokens_are_sampled_than_there_is_room() -> None:
    calls = Calls()
    calls.engine.stop_after = 100
    for texts in (25, 3):
        opened = calls.open()
        await calls.begin(opened, *["u"] * texts)
        await calls.sample(opened, 1000)
        calls.recorder.close(opened)
    assert [branch.run_lengths for branch in calls.recorder.conversations.branches] == [
        [25, 5],
        [3, 10],
    ]
    opened = calls.open()
    with pytest.raises(Refusal, match="sampling.max_total_tokens = 45"):
        await calls.begin(opened, "u", "u")
    calls.recorder.close(opened)
    assert calls.recorder.is_truncated
    assert (
        sum(len(branch.token_ids) for branch in calls.recorder.conversations.branches)
        == 43
    )


async def test_an_episode_is_truncated_if_the_run_cut_off_the_last_reply_of_a_branch() -> (
    None
):
    calls = Calls(
        dataclasses.replace(SAMPLING, max_episode_tokens=60, max_total_tokens=200)
    )
    found = []
    for number, (stop_after, max_tokens) in enumerate(
        ((100, 4), (100, 1000), (3, 1000)), start=1
    ):
        calls.engine.stop_after = stop_after
        opened = calls.open()
        texts = [text for n in range(1, number) for text in (f"u{n}", f"r{n}")]
        await calls.begin(opened, *texts, f"u{number}")
        await calls.sample(opened, max_tokens)
        calls.answer(opened, f"r{number}")
        found.append(calls.recorder.is_truncated)
    (branch,) = calls.recorder.conversations.branches
    assert branch.run_lengths == [1, 4, 1, 10, 1, 4]
    # The client itself wanted four tokens; the last reply ended by itself.
    assert found == [False, True, False]
    calls.engine.stop_after = 100
    other = calls.open()
    await calls.begin(other, "u")
    await calls.sample(other, 10)
    assert calls.recorder.is_truncated


async def test_an_unforeseen_error_of_the_engine_ends_its_call(monkeypatch):
    async def broken(*_: object, **__: object) -> AsyncGenerator[TextPart, None]:
        yield TextPart((), "")
        raise ZeroDivisionError("one")

    calls = Calls()
    monkeypatch.setattr(calls.engine, "stream", broken)
    first = calls.open()
    await calls.begin(first, "u1")
    with pytest.raises(ZeroDivisionError, match="one"):
        await asyncio.wait_for(calls.sample(first), LIMIT_S)
    calls.recorder.close(first)
    await calls.recorder.settled()
