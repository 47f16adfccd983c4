from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.learner.controller.busy import busy_shares, intersection, length, union

intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12)


def seconds(spans) -> set[int]:
    return {s for start, end in spans for s in range(start, end)}


@given(intervals, intervals)
def test_intervals_behave_like_sets_of_seconds(left, right):
    assert seconds(union(left)) == seconds(left)
    both = intersection(union(left), union(right))
    assert seconds(both) == seconds(left) & seconds(right)
    assert length(both) == len(seconds(both))


def test_shares_are_those_of_the_window():
    shares = busy_shares([(0, 6), (5, 8)], [(4, 12)], (0, 10))
    assert shares == {"generation": 0.8, "training": 0.6, "both": 0.4}


def test_an_empty_window_has_no_shares():
    assert busy_shares([(0, 1)], [(0, 1)], (3, 3))["both"] == pytest.approx(0)
