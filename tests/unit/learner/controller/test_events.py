from __future__ import annotations

import asyncio

from slipstream.learner.controller.events import MAX_METRICS, EventLog, Signal


async def test_old_events_are_kept_without_the_metrics_that_metrics_jsonl_has() -> None:
    events = EventLog()
    for step in range(1, MAX_METRICS + 6):
        events.add(f"version {step}", step=step, metrics={"reward_mean": float(step)})
        events.add("something else")
    events.close(1, "done")
    told = [event async for event in events.follow(0)]
    assert [event.number for event in told] == list(range(1, len(told) + 1))
    versions = [event for event in told if event.step]
    assert [event.text for event in versions][:2] == ["version 1", "version 2"]
    with_metrics = [event.step for event in versions if event.metrics]
    assert with_metrics == list(range(6, MAX_METRICS + 6))


async def test_a_task_wakes_once_for_all_changes_of_a_moment() -> None:
    signal, woken = Signal(), 0

    async def count() -> None:
        nonlocal woken
        while True:
            await signal.changes(60.0)
            woken += 1

    counting = asyncio.create_task(count())
    for _ in range(100):
        await asyncio.sleep(0)
        signal.notify()
    async with asyncio.timeout(10):
        while not woken:
            await asyncio.sleep(0.001)
    assert woken < 10
    counting.cancel()


async def test_a_notice_wakes_those_that_wait_and_no_later_ones() -> None:
    signal = Signal()
    signal.notify()
    waiting = [asyncio.create_task(signal.wait(60.0)) for _ in range(2)]
    await asyncio.sleep(0)
    signal.notify()
    async with asyncio.timeout(10):
        await asyncio.gather(*waiting)
    late = asyncio.create_task(signal.wait(60.0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not late.done()
    late.cancel()
