"""Patience on a clock that the test sets."""

from types import SimpleNamespace

import pytest
from slipstream.core import patience
from slipstream.core.patience import Patience


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=1000.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(patience, "time", clock)
    return clock


def test_patience_ends_after_its_seconds_of_attempts(clock) -> None:
    trying = Patience(60.0)
    for left_s in (35.0, 10.0, -15.0):
        assert not trying.is_over
        trying.begin(30.0)
        clock.now_s += 25.0
        assert trying.left_s == left_s
    assert trying.is_over


@pytest.mark.parametrize("asleep_s", [0.0, 3600.0])
def test_an_attempt_takes_no_more_than_its_limit(clock, asleep_s: float) -> None:
    trying = Patience(60.0)
    trying.begin(30.0)
    clock.now_s += 30.0 + asleep_s
    assert (trying.left_s, trying.is_over) == (30.0, False)
    # Nor does the time between two attempts take more.
    trying.begin(10.0)
    assert trying.left_s == 30.0


def test_time_before_the_first_attempt_takes_nothing(clock) -> None:
    trying = Patience(60.0)
    clock.now_s += 100.0
    assert trying.left_s == 60.0
