"""Which deaths of a program are followed by another start, and how soon."""

import pytest
from slipstream.client.launch.children import MAX_PAUSE_S, RestartPolicy
from slipstream.core.errors import FAILED, FINAL_ERROR, NOT_STARTED, USAGE_ERROR


def test_each_pause_is_twice_the_one_before_up_to_a_limit() -> None:
    policy = RestartPolicy(8)
    pauses = [policy.pause_after(FAILED) for _ in range(9)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, *[MAX_PAUSE_S] * 3, None]


def test_only_a_program_that_ends_soon_after_its_start_waits_for_the_next() -> None:
    policy = RestartPolicy(8)
    pauses = [
        policy.pause_after(FAILED, age_s=age_s) for age_s in (0.25, 5.0, 1.0, 60.0)
    ]
    assert pauses == [0.75, 0.0, 3.0, 0.0]


@pytest.mark.parametrize("code", [USAGE_ERROR, FINAL_ERROR])
def test_a_failure_that_a_restart_would_repeat_is_final(code: int) -> None:
    assert RestartPolicy(8).pause_after(code) is None


def test_a_second_start_in_a_row_that_fails_is_final() -> None:
    policy = RestartPolicy(8)
    codes = [NOT_STARTED, FAILED, NOT_STARTED, NOT_STARTED]
    assert [policy.pause_after(code) is None for code in codes] == [
        False,
        False,
        False,
        True,
    ]


def test_progress_forgives_earlier_deaths() -> None:
    policy = RestartPolicy(1)
    assert policy.pause_after(-9) == 1.0
    policy.forgive()
    assert policy.pause_after(-9) == 1.0
    assert policy.pause_after(-9) is None
