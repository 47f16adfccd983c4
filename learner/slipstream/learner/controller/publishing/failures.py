"""The cost of a failed publish: another one, the end of the server's stream, or that of the run."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from slipstream.core.types import ServerId
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.server_states import ServerEvent
from slipstream.learner.controller.servers.session import ServerSession

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
# Failed publishes of one session after which the server is sent away.
MAX_FAILED_PUBLISHES = 8
# Failed publishes after which the server shares no publish with others.
MAX_JOINT_FAILURES = 2
# Failed publishes of one server, while no server serves, after which the run fails. By then the
# server was sent away once and came back.
MAX_FAILED_WHILE_NONE_SERVES = 2 * MAX_FAILED_PUBLISHES
# Largest number of servers, by name, whose failed publishes are counted; the oldest goes first.
MAX_FAILING = 1000


@dataclass(frozen=True)
class FailureCounts:
    """Counts of consecutive failed publishes to one server."""

    # Failures since this session began or last served.
    in_session: int
    # Failures since the server last served, in this or an earlier epoch.
    of_server: int
    # Failures of the server since any server last served.
    while_none_served: int

    @property
    def needs_own_publish(self) -> bool:
        """Whether the server gets its own publish, after the healthy servers."""
        return self.of_server >= MAX_JOINT_FAILURES


class Consequence(Enum):
    """The consequence of a failed publish."""

    # The server is sent the weights again after `retry_wait_s`.
    RETRY = "retry"
    # The controller ends the server's stream; the server may join again.
    SEND_AWAY = "send away"
    # No server could be sent its weights.
    FAIL_RUN = "fail run"


def consequence(counts: FailureCounts, *, is_any_serving: bool) -> Consequence:
    """Returns the consequence of a failed publish, which `counts` already includes.

    The run fails only if `is_any_serving` is false.
    """
    if counts.while_none_served >= MAX_FAILED_WHILE_NONE_SERVES and not is_any_serving:
        return Consequence.FAIL_RUN
    is_last = counts.in_session >= MAX_FAILED_PUBLISHES
    return Consequence.SEND_AWAY if is_last else Consequence.RETRY


def retry_wait_s(num_failed: int) -> float:
    """Returns the seconds between a failure and the next attempt, after failures in a row."""
    return min(FIRST_RETRY_S * 2.0 ** max(num_failed - 1, 0), MAX_RETRY_S)


class Failures:
    """Counts the failed publishes of each server, over all of its epochs, and acts on them."""

    def __init__(self, fleet: Fleet, run: Run) -> None:
        self._fleet, self._run = fleet, run
        # Failures in a row: the first counts since any server served last, the second since that
        # server served last.
        self._while_none_served: Counter[ServerId] = Counter()
        self._of_server: Counter[ServerId] = Counter()

    def together(self, due: Sequence[ServerSession]) -> list[ServerSession]:
        """Returns the servers of `due` that share the next publish.

        Servers whose last two publishes failed are left out, since a member that fails makes all
        others stale. Once only such servers are due, each gets a publish of its own.
        """
        sound = [s for s in due if not self._counts(s).needs_own_publish]
        return sound or sorted(due, key=lambda s: self._of_server[s.key.server_id])[:1]

    def served(self, session: ServerSession) -> None:
        """Notes that a publish to this server succeeded."""
        session.failed_publishes = 0
        self._while_none_served.clear()
        del self._of_server[session.key.server_id]

    def make_stale(self, session: ServerSession, cause: str) -> None:
        """Takes a server out of service until it has a whole version."""
        if self._fleet.find(session.key) is not session:
            return
        session.failed_publishes += 1
        session.on(ServerEvent.FAILED)
        if session.is_leaving:
            return
        session.cause = cause
        self._run.events.warn(f"rollout server {session.name} is stale: {cause}")
        self._follow(session, cause)

    def fetch_failed(self, session: ServerSession, cause: str) -> None:
        """Notes a failed fetch: a serving server keeps its version, any other becomes stale."""
        if not session.is_serving:
            self.make_stale(session, cause)
            return
        assert session.version is not None
        session.failed_publishes += 1
        self._run.events.warn(
            f"rollout server {session.name} keeps version {session.version.step}: {cause}"
        )
        self._follow(session, cause)

    def send_away(self, session: ServerSession, cause: str) -> None:
        """Ends the stream of a server; others get its leases, and it may join again."""
        session.disconnect()
        self._fleet.remove(session, cause)
        self._note(session, cause)

    def _follow(self, session: ServerSession, cause: str) -> None:
        if self._note(session, cause) is Consequence.RETRY:
            session.retry_publish_s = time.monotonic() + retry_wait_s(session.failed_publishes)
        else:
            session.disconnect()
            cause = f"{session.failed_publishes} publishes failed: {cause}"
            self._fleet.remove(session, cause)

    def _counts(self, session: ServerSession) -> FailureCounts:
        server_id = session.key.server_id
        return FailureCounts(
            in_session=session.failed_publishes,
            of_server=self._of_server[server_id],
            while_none_served=self._while_none_served[server_id],
        )

    def _note(self, session: ServerSession, cause: str) -> Consequence:
        """Counts a failed publish and returns its `consequence`; FAIL_RUN also fails the run."""
        for failures in (self._of_server, self._while_none_served):
            failures[session.key.server_id] += 1
            if len(failures) > MAX_FAILING:
                del failures[next(iter(failures))]
        counts, progress = self._counts(session), self._run.progress
        is_any_serving = bool(self._fleet.serving()) or progress.is_over
        found = consequence(counts, is_any_serving=is_any_serving)
        if found is Consequence.FAIL_RUN:
            progress.fail(
                f"no rollout server serves, and {counts.while_none_served} publishes in a row to "
                f"{session.name} failed, the last one: {cause}"
            )
        return found
