"""The rule of failed publishes, for all small counts."""

import pytest
from slipstream.learner.controller.publishing.delivery import (
    MAX_FAILED_PUBLISHES,
    MAX_FAILED_WHILE_NONE_SERVES,
    MAX_RETRY_S,
    FailRun,
    FailureCounts,
    RetryAfter,
    SendAway,
    consequence,
)


def test_a_server_is_tried_again_later_each_time() -> None:
    waits = [
        consequence(FailureCounts(n, n, n), is_any_serving=True)
        for n in range(1, MAX_FAILED_PUBLISHES)
    ]
    assert waits == [RetryAfter(s) for s in (1.0, 2.0, 4.0, 8.0, 16.0, MAX_RETRY_S, MAX_RETRY_S)]


def test_the_last_failure_of_a_session_sends_the_server_away() -> None:
    counts = FailureCounts(MAX_FAILED_PUBLISHES, MAX_FAILED_PUBLISHES, MAX_FAILED_PUBLISHES)
    assert consequence(counts, is_any_serving=False) == SendAway()


@pytest.mark.parametrize("in_session", [1, MAX_FAILED_PUBLISHES])
def test_the_run_ends_only_while_no_server_serves(in_session: int) -> None:
    counts = FailureCounts(in_session, 1, MAX_FAILED_WHILE_NONE_SERVES)
    assert consequence(counts, is_any_serving=False) == FailRun()
    assert consequence(counts, is_any_serving=True) != FailRun()


def test_the_run_goes_on_below_the_limit_whatever_else_is_counted() -> None:
    for in_session in range(20):
        counts = FailureCounts(in_session, 99, MAX_FAILED_WHILE_NONE_SERVES - 1)
        assert consequence(counts, is_any_serving=False) != FailRun()


def test_a_server_that_failed_twice_has_a_publish_of_its_own() -> None:
    assert [FailureCounts(1, n, 1).needs_own_publish for n in (0, 1, 2, 3)] == [
        False,
        False,
        True,
        True,
    ]
