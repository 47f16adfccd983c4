import dataclasses
import os
import time
from types import SimpleNamespace

import pytest
from slipstream.core.machine import process
from slipstream.protocol.queue.base import NOTHING
from slipstream.rollout_server.engine_interface import EngineUse
from slipstream.rollout_server.usage import EpochCounters, UseClock
from slipstream.v1 import fleet_pb2


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    time_of = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("slipstream.rollout_server.usage.time", time_of)
    clock = UseClock()
    clock.advance = lambda seconds: now.__setitem__(0, now[0] + seconds)
    return clock


def test_the_time_with_any_request_counts_once(clock) -> None:
    clock.enter()
    clock.advance(1)
    clock.enter()
    clock.advance(1)
    assert clock.busy_s == 2
    clock.leave()
    clock.advance(1)
    clock.leave()
    clock.advance(5)
    assert clock.busy_s == 3
    clock.enter()
    clock.advance(1)
    assert clock.busy_s == 4


def test_a_pause_is_no_busy_time_with_or_without_requests(clock) -> None:
    # Before the first version there is nothing to pause.
    clock.pause()
    clock.advance(5)
    clock.resume()
    clock.enter()
    clock.advance(1)
    clock.pause()
    clock.advance(10)
    assert (clock.busy_s, clock.paused_s) == (1, 10)
    clock.enter()
    clock.leave()
    clock.leave()
    clock.advance(20)
    clock.pause()
    clock.enter()
    clock.resume()
    clock.advance(2)
    assert (clock.busy_s, clock.paused_s) == (3, 30)
    clock.leave()
    clock.advance(4)
    assert (clock.busy_s, clock.paused_s) == (3, 30)


def test_pauses_count_from_the_start_of_the_epoch() -> None:
    before = dataclasses.replace(use(0, 0, 0), busy_s=5.0, paused_s=2.0)
    now = dataclasses.replace(use(0, 0, 0), busy_s=9.0, paused_s=3.5)
    report = EpochCounters(before).report(now, sent=NOTHING, queued_bytes=0)
    assert (report.busy_s, report.paused_s) == (4.0, 1.5)


def use(generated: int, returned: int, open_requests: int) -> EngineUse:
    return EngineUse(generated, returned, open_requests, 0.0)


def test_tokens_inside_the_engine_are_in_flight() -> None:
    counters = EpochCounters(use(100, 100, 0))
    counters.open_episodes += 1
    counters.sampled(4)
    report = counters.report(use(107, 104, 1), sent=NOTHING, queued_bytes=0)
    assert (report.generated_tokens, report.in_flight_tokens, report.ended_tokens) == (
        7,
        7,
        0,
    )
    counters.sampled(3)
    counters.ended(7)
    report = counters.report(use(107, 107, 0), sent=NOTHING, queued_bytes=0)
    assert (report.generated_tokens, report.in_flight_tokens, report.ended_tokens) == (
        7,
        0,
        7,
    )


def test_a_token_that_went_astray_shows_when_the_engine_is_quiet() -> None:
    counters = EpochCounters(use(0, 0, 0))
    counters.open_episodes += 1
    counters.ended(0)
    report = counters.report(use(3, 2, 0), sent=NOTHING, queued_bytes=0)
    assert report.generated_tokens - report.in_flight_tokens - report.ended_tokens == 3


def astray(report: fleet_pb2.ServerReport) -> int:
    return report.generated_tokens - report.in_flight_tokens - report.ended_tokens


@pytest.mark.parametrize("open_requests", [0, 3])
def test_tokens_that_the_engine_returns_before_it_counts_them_are_not_twice(
    open_requests: int,
) -> None:
    counters = EpochCounters(use(50, 50, 0))
    counters.open_episodes += 1
    counters.sampled(98)
    counters.ended(98)
    report = counters.report(use(50, 148, open_requests), sent=NOTHING, queued_bytes=0)
    assert (report.generated_tokens, astray(report)) == (98, 0)
    report = counters.report(use(148, 148, open_requests), sent=NOTHING, queued_bytes=0)
    assert (report.generated_tokens, astray(report)) == (98, 0)


@pytest.mark.parametrize("is_last", [False, True])
def test_tokens_that_the_engine_never_counts_show_when_its_counters_stand(
    is_last: bool,
) -> None:
    counters = EpochCounters(use(0, 0, 0))
    counters.open_episodes += 1
    counters.sampled(5)
    counters.ended(5)
    if not is_last:
        counters.report(use(3, 5, 0), sent=NOTHING, queued_bytes=0)
    report = counters.report(
        use(3, 5, 0), sent=NOTHING, queued_bytes=0, is_last=is_last
    )
    assert astray(report) == -2


def test_memory_is_measured_again_after_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {os.getpid(): 1, 11: 20, 12: 3000}
    monkeypatch.setattr(process, "resident_bytes", lambda each: sizes[each.pid])
    counters = EpochCounters(use(0, 0, 0))
    found = []
    for now_s, below in ((0.0, (11, 12)), (4.9, ()), (5.0, ())):
        listed = [process.Descendant(pid, 0) for pid in below]
        monkeypatch.setattr(time, "monotonic", lambda now_s=now_s: now_s)
        monkeypatch.setattr(process, "descendants", lambda _, listed=listed: listed)
        found.append(counters.resident_bytes())
    assert found == [3021, 3021, 1]
