"""The rule of failed publishes, for all small counts."""

import pytest
from slipstream.learner.controller.publishing import receivers
from slipstream.learner.controller.publishing.receivers import Consequence, consequence

LAST = receivers.MAX_FAILED_PUBLISHES


def test_a_server_is_tried_again_later_each_time() -> None:
    numbers = range(1, LAST)
    for n in numbers:
        assert consequence(n, n, is_any_serving=True) is Consequence.RETRY
    longest_s = receivers.MAX_RETRY_S
    waits_s = [1.0, 2.0, 4.0, 8.0, 16.0, longest_s, longest_s]
    assert [receivers.retry_wait_s(n) for n in numbers] == waits_s


def test_the_last_failure_of_a_session_sends_the_server_away() -> None:
    assert consequence(LAST, LAST, is_any_serving=False) is Consequence.SEND_AWAY


@pytest.mark.parametrize("in_session", range(20))
def test_the_run_ends_only_while_no_server_serves(in_session: int) -> None:
    most = receivers.MAX_FAILED_WHILE_NONE_SERVES
    assert consequence(in_session, most, is_any_serving=False) is Consequence.FAIL_RUN
    assert consequence(in_session, most, is_any_serving=True) is not Consequence.FAIL_RUN
    assert consequence(in_session, most - 1, is_any_serving=False) is not Consequence.FAIL_RUN
