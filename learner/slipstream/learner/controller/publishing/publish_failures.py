"""The consequences of failed publishes to a rollout server: a pure rule on counts.

A server that failed is sent the weights again, after a wait that doubles. After two failed
publishes it gets a publish of its own, because a member that fails makes all others stale. After
eight it is sent away and may join again. After sixteen, while no server serves, the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
# Failed publishes of one session after which the server is sent away.
MAX_FAILED_PUBLISHES = 8
# Failed publishes after which the server shares no publish with others.
MAX_JOINT_FAILURES = 2
# Failed publishes of one server, while no server serves, after which the run fails. By then the
# server was sent away once and came back.
MAX_FAILED_WHILE_NONE_SERVES = 2 * MAX_FAILED_PUBLISHES


@dataclass(frozen=True)
class FailureCounts:
    """Numbers of publishes to one server that failed in a row."""

    # Failures since this session began or last served.
    in_session: int
    # Failures since the server last served, in this or an earlier epoch.
    of_server: int
    # Failures of the server since any server last served.
    while_none_served: int

    @property
    def needs_own_publish(self) -> bool:
        """Whether the server is sent weights alone, after the healthy servers."""
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
    """Returns the consequence of a failure; `counts` already includes that failure."""
    if counts.while_none_served >= MAX_FAILED_WHILE_NONE_SERVES and not is_any_serving:
        return FailRun()
    if counts.in_session >= MAX_FAILED_PUBLISHES:
        return SendAway()
    return RetryAfter(min(FIRST_RETRY_S * 2 ** max(counts.in_session - 1, 0), MAX_RETRY_S))
