"""The facts of a run's summary: busy times, resources and the rate of generation."""

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.types import ServerId
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.records.history import BusySeconds, RunHistory
from slipstream.learner.controller.reporting.metrics import RunRecorder
from slipstream.learner.controller.reporting.run_facts import (
    BusyMeter,
    GenerationRate,
    RunFacts,
    busy_seconds,
    include,
    intersection,
    length,
    union,
)
from slipstream.learner.controller.reporting.trackers import Trackers
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.v1 import fleet_pb2
from support.fakes.small_configs import config_of


@pytest.mark.parametrize(
    ("rewards", "first", "last"),
    [
        ([], [], []),
        ([0.5], [0.5], [0.5]),
        ([0.0, 1.0], [0.0], [1.0]),
        ([0.0, 0.5, 1.0], [0.0], [1.0]),
        ([*range(9)], [0, 1, 2, 3], [5, 6, 7, 8]),
        ([*range(10)], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]),
        ([*range(99)], [0, 1, 2, 3, 4], [94, 95, 96, 97, 98]),
    ],
)
def test_first_and_last_rewards_are_those_of_other_steps(
    rewards: list[float], first: list[float], last: list[float]
) -> None:
    facts = RunFacts()
    for reward in rewards:
        facts.steps += 1
        facts.count_row({"reward_mean": reward})
    assert facts.edge_rewards() == (first, last)


intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12)


def seconds(spans) -> set[int]:
    return {s for start, end in spans for s in range(start, end)}


@settings(deadline=None)
@given(intervals, intervals)
def test_intervals_behave_like_sets_of_seconds(left, right):
    assert seconds(union(left)) == seconds(left)
    both = intersection(union(left), union(right))
    assert seconds(both) == seconds(left) & seconds(right)
    assert length(both) == len(seconds(both))


def test_shares_are_those_of_the_window():
    busy = busy_seconds([(0, 6), (5, 8)], [(4, 12)], (0, 10))
    assert busy.shares() == {"generation": 0.8, "training": 0.6, "both": 0.4}


def test_an_empty_window_has_no_shares():
    assert busy_seconds([(0, 1)], [(0, 1)], (3, 3)).shares()["both"] == pytest.approx(0)


def test_a_meter_begins_with_generation_and_ends_with_the_last_step():
    meter = BusyMeter()
    meter.trained((0, 3))
    assert meter.of_this_start() == BusySeconds()
    meter.generated([(2, 4), (5, 30)])
    meter.trained((6, 10))
    assert meter.of_this_start() == BusySeconds(window=8, generation=7, training=5, both=5)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(1, 9)), max_size=12),
    st.integers(0, 20),
)
def test_settling_changes_nothing_when_reports_are_not_later_than_it(steps, delay):
    settled, whole, now = BusyMeter(), BusyMeter(), 0
    for idle, generating, training in steps:
        start = now + idle
        now = start + generating + training
        for meter in (settled, whole):
            meter.generated([(start, start + generating)])
            meter.trained((start + generating // 2, now))
        settled.settle(now - delay)
        assert settled.of_this_start() == whole.of_this_start()


def test_what_is_reported_after_it_was_settled_has_no_effect():
    meter = BusyMeter()
    meter.generated([(0, 2)])
    meter.trained((2, 10))
    meter.settle(6)
    meter.generated([(3, 8)])
    assert meter.of_this_start() == BusySeconds(window=10, generation=4, training=8, both=2)


def test_starts_of_a_run_add_up():
    meter = BusyMeter()
    meter.earlier = BusySeconds(window=10, generation=4, training=8, both=2)
    meter.generated([(100, 110)])
    meter.trained((105, 110))
    assert meter.of_the_run().shares() == {"generation": 0.7, "training": 0.65, "both": 0.35}


def test_intervals_that_are_included_one_by_one_are_their_union() -> None:
    source = random.Random(3)
    for _ in range(300):
        intervals, merged = [], []
        for _ in range(source.randint(0, 12)):
            start = source.randint(0, 20)
            intervals.append((float(start), float(start + source.randint(-1, 5))))
            include(merged, intervals[-1])
            assert merged == union(intervals)


def test_a_fleet_that_is_always_busy_is_one_interval() -> None:
    meter = BusyMeter()
    for beat in range(1000):
        for server in range(4):
            meter.generated([(beat + server / 8, beat + 1 + server / 8)])
    assert len(meter._generation) == 1


def test_the_time_before_the_first_generation_does_not_count() -> None:
    rate = GenerationRate()
    assert rate.at(50.0, 0) == 0.0
    rate.began(100.0)
    rate.began(101.0)
    assert rate.at(102.0, 500) == pytest.approx(250.0)


def test_the_tokens_of_earlier_starts_do_not_count() -> None:
    rate = GenerationRate()
    rate.earlier = 10_000
    rate.began(100.0)
    assert rate.at(102.0, 10_500) == pytest.approx(250.0)


def test_the_rate_is_that_of_the_newest_seconds() -> None:
    rate = GenerationRate()
    rate.began(0.0)
    assert rate.at(2.0, 200) == pytest.approx(100.0)
    assert rate.at(4.0, 400) == pytest.approx(100.0)
    # The rate counts from 4 s: the newest point at least 5 s back.
    assert rate.at(10.0, 4000) == pytest.approx(600.0)


def test_a_run_that_goes_on_knows_what_its_earlier_starts_generated(tmp_path: Path) -> None:
    trackers = Trackers({}, lambda text: None)
    recorder = RunRecorder(tmp_path, config_of(tmp_path), trackers, None, EventLog())
    history = RunHistory()
    # The second had delivered more than its last heartbeat said.
    for epoch, reported, received in ((1, 700, 600), (2, 100, 300)):
        count = history.servers.join(ServerKey(ServerId("a"), epoch))
        count.reported, count.received = reported, received
    history.servers.all_died()
    recorder.restore(history)
    report = fleet_pb2.ServerReport()
    before_s, now_s = time.monotonic(), time.time()
    report.busy_intervals.add(start_s=now_s - 100.0, end_s=now_s)
    recorder.server_report(report)
    after_s = time.monotonic()
    # A moment passed between the two clocks.
    slowest = 25_000 / (100.0 + after_s - before_s)
    assert slowest - 0.1 < recorder.rate.at(after_s, 26_000) < 250.1
    recorder.close()


def test_a_server_whose_clock_is_ahead_makes_no_rate_without_bounds(tmp_path: Path) -> None:
    recorder = RunRecorder(
        tmp_path, config_of(tmp_path), Trackers({}, lambda text: None), None, EventLog()
    )
    report = fleet_pb2.ServerReport()
    before_s = time.monotonic()
    report.busy_intervals.add(start_s=time.time() + 60.0, end_s=time.time() + 61.0)
    recorder.server_report(report)
    after_s = time.monotonic()
    slowest = 200 / (2.0 + after_s - before_s)
    assert slowest - 0.1 < recorder.rate.at(after_s + 2.0, 200) < 100.1
    recorder.close()
