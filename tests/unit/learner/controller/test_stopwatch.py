from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from slipstream.learner.controller.loop_clock import Stopwatch

changes = st.lists(st.tuples(st.integers(0, 100), st.booleans(), st.booleans()), max_size=20)


@given(changes, st.integers(0, 100))
def test_only_time_in_which_it_runs_is_counted(
    changes: list[tuple[int, bool, bool]], last: int
) -> None:
    """Seconds until each change, whether it runs then, and whether there is progress before."""
    watch, now, running, expected = Stopwatch(), 0, False, 0
    for passed, runs, progress in changes:
        now += passed
        expected += passed if running else 0
        assert watch.total_s(now) == expected
        if progress:
            watch.reset(now)
            expected = 0
        watch.note(now, running=runs)
        running = runs
    assert watch.total_s(now + last) == expected + (last if running else 0)


def test_a_stopwatch_that_stands_still_is_not_started_by_progress() -> None:
    watch = Stopwatch()
    watch.reset(5.0)
    assert watch.total_s(9.0) == 0.0
