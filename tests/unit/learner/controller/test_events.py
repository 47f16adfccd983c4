import asyncio
import types
from collections.abc import Iterator

import pytest
from slipstream.learner.controller.events import (
    MAX_BYTES,
    MAX_CHARACTERS,
    MAX_EVENTS,
    MAX_METRICS,
    EventLog,
    Signal,
)
from support.rigs.waiting import LIMIT_S


async def test_old_events_are_kept_without_the_metrics_that_metrics_jsonl_has() -> None:
    events = EventLog()
    for step in range(1, MAX_METRICS + 6):
        events.add(f"version {step}", step=step, metrics={"reward_mean": float(step)})
        events.add("something else")
    events.close(1, "done")
    texts = [event async for event in events.follow(0)]
    assert [event.number for event in texts] == list(range(1, len(texts) + 1))
    versions = [event for event in texts if event.step]
    assert [event.text for event in versions][:2] == ["version 1", "version 2"]
    with_metrics = [event.step for event in versions if event.metrics]
    assert with_metrics == list(range(6, MAX_METRICS + 6))


async def test_long_events_push_out_older_ones_before_ten_thousand_are_kept() -> None:
    events = EventLog()
    number = 2 * MAX_BYTES // MAX_CHARACTERS
    for _ in range(number):
        events.add("x" * MAX_CHARACTERS)
    events.close(1, "done")
    texts = [event async for event in events.follow(0)]
    assert sum(event.ByteSize() for event in texts) <= MAX_BYTES
    assert len(texts) > MAX_BYTES // MAX_CHARACTERS - 10
    assert [event.number for event in texts] == list(
        range(number + 2 - len(texts), number + 2)
    )


async def test_a_follower_that_is_behind_begins_with_the_oldest_event_that_is_kept() -> (
    None
):
    events = EventLog()
    for step in range(MAX_EVENTS + 5):
        events.add("a version", step=step + 1, metrics={"reward_mean": 0.5})
    events.close(1, "done")
    assert [event.number async for event in events.follow(3)][:2] == [7, 8]
    assert [event.number async for event in events.follow(MAX_EVENTS + 4)] == [
        MAX_EVENTS + 5,
        MAX_EVENTS + 6,
    ]
    for beyond in (MAX_EVENTS + 6, 2**64 - 1):
        assert [event.number async for event in events.follow(beyond)] == []


@types.coroutine
def turn() -> Iterator[None]:
    """Lets the loop turn once, whatever its clock says."""
    yield


async def test_a_task_wakes_once_for_all_changes_of_a_moment() -> None:
    signal = Signal()
    woken = 0

    async def count() -> None:
        nonlocal woken
        while True:
            await signal.changes(60.0)
            woken += 1

    loop = asyncio.get_running_loop()
    now_s = loop.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", lambda: now_s)
        counting = asyncio.create_task(count())
        for _ in range(100):
            await turn()
            signal.notify()
        assert woken == 0
        # The moment is over.
        now_s += 1.0
        while not woken:
            await turn()
    assert woken == 1
    counting.cancel()


async def test_a_notice_wakes_those_that_wait_and_no_later_ones() -> None:
    signal = Signal()
    signal.notify()
    waiting = [
        asyncio.create_task(signal.changes(60.0, gather_s=0.0)) for _ in range(2)
    ]
    await asyncio.sleep(0)
    signal.notify()
    await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S)
    late = asyncio.create_task(signal.changes(60.0, gather_s=0.0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not late.done()
    late.cancel()


async def test_one_change_of_many_wakes_only_those_that_gather() -> None:
    signal = Signal()
    gathering = asyncio.create_task(signal.changes(60.0, gather_s=0.001))
    waiting = asyncio.create_task(signal.changes(60.0, gather_s=0.0))
    await asyncio.sleep(0)
    signal.notify(gathered=True)
    async with asyncio.timeout(LIMIT_S):
        await gathering
        assert not waiting.done()
        signal.notify()
        await waiting
