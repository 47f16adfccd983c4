"""The consequences of failed publishes to a rollout server: a pure rule on counts.

A server that failed is sent the weights again, later each time. One that failed in two publishes
gets a publish of its own, because a member that fails makes all others stale. After eight it is
sent away and may join again; after sixteen in which no server got to serve, the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
# The server is sent away after so many failures of one session.
MAX_FAILED_PUBLISHES = 8
# The server shares publishes with others up to so many failures.
MAX_JOINT_FAILURES = 2
# The run fails after so many while no server serves. By then this one was sent away once, and came
# back.
MAX_VAIN_PUBLISHES = 2 * MAX_FAILED_PUBLISHES


@dataclass(frozen=True)
class FailureCounts:
    """Publishes to one server that failed in a row."""

    # Since this session of the server began, or served last.
    in_session: int
    # Since the server served last, in this epoch of it or an earlier one.
    of_server: int
    # The same, since any server served last.
    while_none_served: int

    @property
    def needs_own_publish(self) -> bool:
        """Whether the server is sent weights alone, after those that can be trusted."""
        return self.of_server >= MAX_JOINT_FAILURES


@dataclass(frozen=True)
class RetryAfter:
    """The server is sent the weights again after `wait_s` seconds."""

    wait_s: float


@dataclass(frozen=True)
class SendAway:
    """The server's stream ends; it may join again."""


@dataclass(frozen=True)
class FailRun:
    """The run ends: no server could be given its weights."""


def consequence(counts: FailureCounts, *, is_any_serving: bool) -> RetryAfter | SendAway | FailRun:
    """Returns what follows from the failure that `counts` includes."""
    if counts.while_none_served >= MAX_VAIN_PUBLISHES and not is_any_serving:
        return FailRun()
    if counts.in_session >= MAX_FAILED_PUBLISHES:
        return SendAway()
    return RetryAfter(min(FIRST_RETRY_S * 2 ** max(counts.in_session - 1, 0), MAX_RETRY_S))
