"""What leases reserve: the queue never has to hold more than it can."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.reservation import free_bytes, may_promise, smallest_queue


def test_used_and_promised_bytes_are_what_is_not_free() -> None:
    assert free_bytes(1000, 300, 4, 100) == 300
    assert free_bytes(1000, 950, 1, 100) == -50


@pytest.mark.parametrize(("episodes", "fits"), [(2, True), (3, True), (4, False)])
def test_a_group_is_promised_only_what_is_free(episodes: int, fits: bool) -> None:
    assert may_promise(300, episodes, 100) is fits


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_no_order_of_events_ever_fills_the_queue_beyond_its_size(
    seed: int, group_size: int, groups_per_step: int, spare: int
) -> None:
    """Groups are leased, episodes end with any size, whole batches are journaled."""
    draw, largest = random.Random(seed), 10
    size = smallest_queue(groups_per_step, group_size, largest) + spare
    missing, waiting, complete = [], 0, []
    for _ in range(60):
        free = free_bytes(size, waiting + sum(complete), sum(missing), largest)
        assert free >= 0
        grant = may_promise(free, group_size, largest)
        # Never stuck: with less than a batch leased there is room for one more group.
        assert grant or len(missing) + len(complete) >= groups_per_step
        match draw.randrange(3):
            case 0 if grant:
                missing.append(group_size)
            case 1 if missing:
                index = draw.randrange(len(missing))
                missing[index] -= 1
                waiting += draw.randint(1, largest)
                if not missing[index]:
                    del missing[index]
                    # The bytes of the whole group, at most.
                    taken = min(waiting, group_size * largest)
                    waiting -= taken
                    complete.append(taken)
            case 2 if len(complete) >= groups_per_step:
                del complete[:groups_per_step]
