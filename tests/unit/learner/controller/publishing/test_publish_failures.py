"""What follows a failed publish, for all small counts."""

import pytest
from slipstream.learner.controller.publishing import receivers
from slipstream.learner.controller.publishing.receivers import Failures
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import SERVING, STALE
from support.rigs.publishing_scene import joined, run_of

LAST = receivers.MAX_FAILED_PUBLISHES


def test_a_server_is_tried_again_later_each_time() -> None:
    longest_s = receivers.MAX_RETRY_S
    waits_s = [1.0, 2.0, 4.0, 8.0, 16.0, longest_s, longest_s]
    assert [receivers.retry_wait_s(n) for n in range(1, LAST)] == waits_s


@pytest.mark.parametrize("another_serves", [False, True])
def test_the_last_failure_of_a_session_sends_it_away_and_the_run_ends_if_no_server_serves(
    another_serves: bool,
) -> None:
    run = run_of()
    fleet = Fleet(run)
    failures = Failures(fleet, run)
    joined(fleet, "b").state = SERVING if another_serves else STALE
    number = 0
    limit = receivers.MAX_FAILED_WHILE_NONE_SERVES
    while number < limit + LAST:
        session = joined(fleet, "a")
        for in_session in range(1, LAST + 1):
            number += 1
            failures.make_stale(session, "broken")
            has_failed = number >= limit and not another_serves
            assert run.progress.has_failed is has_failed, number
            assert (fleet.find(session.key) is session) is (in_session < LAST), number
