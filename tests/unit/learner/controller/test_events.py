from __future__ import annotations

from slipstream.learner.controller.events import MAX_METRICS, EventLog


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
