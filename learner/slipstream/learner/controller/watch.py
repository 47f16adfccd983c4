"""The watches of the controller: over servers, leases and the run as a whole.

Consumes: the state of the fleet and the environments. Produces: cancelled leases, removed servers,
warnings, the end of a run that cannot continue. Waits for: a fixed period. Unblocked by: the clock.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.core.types import GroupId
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.scheduler import Books
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.tasks import EnvironmentEntry
from slipstream.learner.controller.trajectories.intake import Intake

WATCH_S = 0.25
# Longest time between two calls of `LoopClock.look` while the event loop does not stall.
LATE_S = 2 * WATCH_S
# Seconds of serving within which a server must end a cancelled lease.
CANCEL_LIMIT_S = 60.0
# Seconds after the heartbeat timeout within which a server joins a restarted controller.
REJOIN_S = 10.0


class RunWatch:
    """Checks servers, leases, journal and progress every `WATCH_S` seconds."""

    def __init__(
        self, run: ControlledRun, books: Books, publisher: Publisher, intake: Intake
    ) -> None:
        self._run = run
        self._progress = run.progress
        self._config = run.config
        self._book = books.leases
        self._environments = books.environments
        self._fleet = books.fleet
        self._journal = books.journal
        self._publisher = publisher
        self._intake = intake
        self._leases = LeaseWatch()
        # Whether the leases were taken back since the run last moved.
        self._gave_others_a_try = False

    async def watch_forever(self) -> None:
        """Removes silent servers, takes back late leases, and fails a run that is stuck."""
        clock = self._run.clock
        try:
            while True:
                now_s = time.monotonic()
                clock.look(now_s, now_s + LATE_S)
                await asyncio.sleep(WATCH_S)
                for session in list(self._fleet.sessions.values()):
                    if session.silent_s > self._config.controller.heartbeat_timeout_s:
                        self._fleet.remove(session, f"silent for {session.silent_s:.1f} s")
                if not self._progress.is_over:
                    self._look_at_leases()
                    cause = await asyncio.to_thread(self._journal.trouble) or self._cause_to_fail()
                    if cause:
                        self._progress.fail(cause)
        finally:
            clock.look(time.monotonic(), math.inf)

    def _look_at_leases(self) -> None:
        patience_s = self._config.controller.heartbeat_timeout_s + REJOIN_S
        self._book.awaited.look(self._run.clock.now_s(), patience_s)
        groups = self._book.groups.values()
        served_s = self._fleet.served_s()
        limit_s = self._config.controller.lease_timeout_s
        overdue, stuck = self._leases.overdue(groups, served_s, limit_s=limit_s)
        for group in overdue:
            self._intake.take_back(
                group, f"no episode ended in {limit_s:g} s of serving (controller.lease_timeout_s)"
            )
        for key in stuck:
            session = self._fleet.find(key)
            if session is not None:
                cause = f"it did not end a lease within {CANCEL_LIMIT_S:g} s of serving"
                self._fleet.remove(session, cause)

    def _cause_to_fail(self) -> str:
        if failure := self._progress.unheard_failure:
            return failure
        settings = self._config.controller
        now = self._run.clock.now_s()
        training = self._environments.training()
        causes = "; ".join(f"{entry.spec.name}: {entry.cause}" for entry in training)
        if training and len(self._environments.suspended()) == len(training):
            return f"no environment is left: {causes}"
        keys = [session.key for session in self._fleet.sessions.values()]
        if (
            keys
            and training
            and all(
                entry.client_episodes is None
                and not entry.loaded_on
                and all(key in entry.failed_on for key in keys)
                for entry in training
            )
        ):
            return f"no environment could be loaded: {causes}"
        if overdue := self._publisher.overdue():
            return overdue
        if not self._fleet.sessions:
            empty = now - self._fleet.empty_since_s
            limit_s = settings.stall_timeout_s
            if not self._fleet.departed:
                # The first server joins when its engine has started.
                limit_s += self._config.rollout_server.start_timeout_s
            if empty > limit_s:
                return f"no rollout server was connected for {empty:.0f} s"
            return ""
        return self._stall(training)

    def _stall(self, training: Sequence[EnvironmentEntry]) -> str:
        """Returns the cause if nothing has moved for too long, with servers and a trainer there.

        All leases go to other servers once before that fails the run.
        """
        idle = self._progress.idle_s
        limit_s = self._config.controller.stall_timeout_s
        self._gave_others_a_try &= idle > limit_s
        waits_for_fleet = self._progress.has_trainer and bool(self._fleet.serving())
        if waits_for_fleet and training and idle > limit_s * (1 + self._gave_others_a_try):
            if not self._gave_others_a_try and self._give_others_a_try():
                return ""
            waited_for = self._progress.waiting_for
            failures = [
                f"; the last failure in {e.spec.name}: {e.cause}" for e in training if e.cause
            ]
            line = f"nothing moved for {idle:.0f} s of serving while waiting for {waited_for}"
            if self._gave_others_a_try:
                line += ", though all leases were taken back once and given to other servers"
            return line + "".join(failures)
        return ""

    def _give_others_a_try(self) -> bool:
        """Takes all leases back, so that other servers get them; returns False if there is none.

        A server that beats and ends no episode would otherwise end the run. The only server gets
        back what it has closed.
        """
        groups = list(self._book.groups.values())
        late = [group for group in groups if group.closed and group.holder and group.running]
        if len(self._fleet.serving()) > 1:
            late, _ = self._leases.overdue(groups, self._fleet.served_s(), limit_s=-1.0)
        for group in late:
            self._intake.take_back(
                group,
                f"nothing moved for {self._progress.idle_s:.0f} s of serving "
                "(controller.stall_timeout_s)",
            )
        self._gave_others_a_try = bool(late)
        return self._gave_others_a_try


@dataclass
class _Mark:
    # Number of the group's lease.
    number: int
    # The last ended attempt of each member; a change is progress of the lease.
    ended: tuple[tuple[int, int], ...]
    # The server's clock at the last progress.
    served_s: float
    is_cancelled: bool = False


class LeaseWatch:
    """Remembers when each lease last made progress, by the clock of its server.

    That clock runs only while the server serves. It stops while the server loads weights, is stale,
    rests or waits for a publish.
    """

    def __init__(self) -> None:
        self._marks: dict[GroupId, _Mark] = {}

    def overdue(
        self, groups: Iterable[Group], served_s: Mapping[ServerKey, float], *, limit_s: float
    ) -> tuple[list[Group], list[ServerKey]]:
        """Returns each overdue lease once, and each server that is late to end such a lease.

        A lease is overdue after `limit_s` seconds of serving without an ended attempt. A server is
        late when it has served for more than `CANCEL_LIMIT_S` seconds since this method
        reported the lease as overdue, and since the last end of an attempt of the lease. `served_s`
        maps each server to the seconds for which it has served.
        """
        late = []
        stuck = []
        marks = {}
        for group in groups:
            holder = group.holder
            number = group.num_leases
            if holder is None or holder not in served_s or not group.running:
                continue
            ended = tuple(sorted(group.attempts.items()))
            now_s = served_s[holder]
            mark = self._marks.get(group.group_id)
            if mark is None or (mark.number, mark.ended) != (number, ended):
                is_cancelled = mark is not None and mark.is_cancelled and mark.number == number
                mark = _Mark(number, ended, now_s, is_cancelled)
            elif mark.is_cancelled:
                if now_s - mark.served_s > CANCEL_LIMIT_S:
                    stuck.append(holder)
            elif now_s - mark.served_s > limit_s:
                late.append(group)
                mark = _Mark(number, ended, now_s, is_cancelled=True)
            marks[group.group_id] = mark
        self._marks = marks
        return late, list(dict.fromkeys(stuck))
