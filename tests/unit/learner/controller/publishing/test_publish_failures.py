"""The rule of failed publishes, for all small counts."""

import pytest
from slipstream.learner.controller.publishing import receivers


def test_a_server_is_tried_again_later_each_time() -> None:
    numbers = range(1, receivers.MAX_FAILED_PUBLISHES)
    for n in numbers:
        counts = receivers.FailureCounts(n, n, n)
        assert receivers.consequence(counts, is_any_serving=True) is receivers.Consequence.RETRY
    longest_s = receivers.MAX_RETRY_S
    waits_s = [1.0, 2.0, 4.0, 8.0, 16.0, longest_s, longest_s]
    assert [receivers.retry_wait_s(n) for n in numbers] == waits_s


def test_the_last_failure_of_a_session_sends_the_server_away() -> None:
    counts = receivers.FailureCounts(
        receivers.MAX_FAILED_PUBLISHES,
        receivers.MAX_FAILED_PUBLISHES,
        receivers.MAX_FAILED_PUBLISHES,
    )
    assert receivers.consequence(counts, is_any_serving=False) == receivers.Consequence.SEND_AWAY


@pytest.mark.parametrize("in_session", [1, receivers.MAX_FAILED_PUBLISHES])
def test_the_run_ends_only_while_no_server_serves(in_session: int) -> None:
    counts = receivers.FailureCounts(in_session, 1, receivers.MAX_FAILED_WHILE_NONE_SERVES)
    assert receivers.consequence(counts, is_any_serving=False) == receivers.Consequence.FAIL_RUN
    assert receivers.consequence(counts, is_any_serving=True) != receivers.Consequence.FAIL_RUN


def test_the_run_goes_on_below_the_limit_whatever_else_is_counted() -> None:
    for in_session in range(20):
        counts = receivers.FailureCounts(in_session, 99, receivers.MAX_FAILED_WHILE_NONE_SERVES - 1)
        assert receivers.consequence(counts, is_any_serving=False) != receivers.Consequence.FAIL_RUN


def test_a_server_that_failed_twice_has_a_publish_of_its_own() -> None:
    assert [receivers.FailureCounts(1, n, 1).needs_own_publish for n in (0, 1, 2, 3)] == [
        False,
        False,
        True,
        True,
    ]
