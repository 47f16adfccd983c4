from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.learner.controller.records.history import BusySeconds
from slipstream.learner.controller.reporting.run_facts import (
    BusyMeter,
    busy_seconds,
    include,
    intersection,
    length,
    union,
)

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
