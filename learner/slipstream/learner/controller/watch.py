"""The watch over the whole run: removes silent servers and fails a run that cannot continue.

Consumes: the state of the fleet and the environments. Produces: the end of a run.
Waits for: its period. Unblocked by: the clock.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from slipstream.learner.controller.leasing.books import Books
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.lease_watch import CANCEL_LIMIT_S, LeaseWatch
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.tasks.environments import EnvironmentEntry
from slipstream.v1 import environment_pb2

WATCH_S = 0.25
# Longest time between two looks of a healthy event loop; a longer time is a stall of the loop.
LATE_S = 2 * WATCH_S


class RunWatch:
    """Checks servers, leases, journal and progress every `WATCH_S` seconds."""

    def __init__(
        self,
        run: Run,
        books: Books,
        take_back: Callable[[Group, str], None],
    ) -> None:
        """`take_back` is called with each group whose lease makes no progress, and the cause."""
        self._journal = books.journal
        self._run, self._progress = run, run.progress
        self._config = run.config
        self._book, self._environments = books.leases, books.environments
        self._fleet = books.fleet
        self._take_back = take_back
        self._leases = LeaseWatch(self._config.controller.lease_timeout_s)

    async def watch_forever(self) -> None:
        """Removes silent servers and fails a run that cannot continue, until it is cancelled."""
        clock = self._run.clock
        try:
            while True:
                now_s = time.monotonic()
                clock.look(now_s, now_s + LATE_S)
                await asyncio.sleep(WATCH_S)
                self._fleet.remove_silent()
                if not self._progress.is_over:
                    self._look_at_leases()
                    cause = await asyncio.to_thread(self._journal.trouble) or self._cause_to_fail()
                    if cause:
                        self._progress.fail(cause)
        finally:
            clock.look(time.monotonic(), math.inf)

    def _look_at_leases(self) -> None:
        overdue = self._leases.overdue(list(self._book.groups.values()), self._fleet.served_s())
        limit_s = self._config.controller.lease_timeout_s
        for group in overdue.groups:
            self._take_back(
                group, f"no episode ended in {limit_s:g} s of serving (controller.lease_timeout_s)"
            )
        for key in overdue.servers:
            session = self._fleet.find(key)
            if session is not None:
                session.disconnect()
                cause = f"it did not end a lease within {CANCEL_LIMIT_S:g} s of serving"
                self._fleet.remove(session, cause)

    def _cause_to_fail(self) -> str:
        settings, now = self._config.controller, self._run.clock.now_s()
        training = self._environments.training()
        suspended = environment_pb2.ENVIRONMENT_STATE_SUSPENDED
        if training and all(entry.state == suspended for entry in training):
            causes = "; ".join(f"{entry.spec.name}: {entry.cause}" for entry in training)
            return f"no environment is left: {causes}"
        unloadable = [entry for entry in training if self._nowhere(entry)]
        if training and len(unloadable) == len(training):
            causes = "; ".join(f"{entry.spec.name}: {entry.cause}" for entry in training)
            return f"no environment could be loaded: {causes}"
        pending = self._progress.pending_publish
        if pending is not None and now > pending.until_s:
            within = f"within {pending.limit_s:.0f} s"
            return f"the trainer did not end publish {pending.publish_id} {within}"
        if not self._fleet.sessions:
            empty = now - self._fleet.empty_since_s
            limit_s = settings.fleet_timeout_s
            if not self._fleet.departed:
                # The first server joins when its engine has started.
                limit_s += self._config.rollout_server.start_timeout_s
            if empty > limit_s:
                return f"no rollout server was connected for {empty:.0f} s"
            return ""
        idle = self._progress.idle_s
        waits_for_fleet = self._progress.has_trainer and bool(self._fleet.serving())
        if waits_for_fleet and training and idle > settings.stall_timeout_s:
            waited_for = self._progress.waiting_for
            failures = [
                f"; the last failure in {e.spec.name}: {e.cause}" for e in training if e.cause
            ]
            line = f"nothing moved for {idle:.0f} s of serving while waiting for {waited_for}"
            return line + "".join(failures)
        return ""

    def _nowhere(self, entry: EnvironmentEntry) -> bool:
        sessions = self._fleet.sessions.values()
        return (
            entry.client_episodes is None
            and not entry.loaded_on
            and bool(sessions)
            and all(session.key in entry.failed_on for session in sessions)
        )
