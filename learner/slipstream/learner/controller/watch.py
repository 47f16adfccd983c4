"""The watch over the whole run: silent servers leave, and what cannot go on ends with its cause.

Consumes: the state of the fleet and the environments. Produces: the end of a run.
Waits for: its period. Unblocked by: the clock.
"""

from __future__ import annotations

import asyncio
import time

from slipstream.learner.controller.environments import EnvironmentBook, EnvironmentEntry
from slipstream.learner.controller.fleet import Fleet
from slipstream.learner.controller.progress import RunProgress
from slipstream.v1 import environment_pb2

WATCH_S = 0.25


class RunWatch:
    """Looks at everything again and again."""

    def __init__(self, progress: RunProgress, environments: EnvironmentBook, fleet: Fleet) -> None:
        self._progress = progress
        self._config = progress.config
        self._environments = environments
        self._fleet = fleet

    async def watch_forever(self) -> None:
        """Removes silent servers and fails a run that cannot go on, until it is cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._fleet.remove_silent()
            if not self._fleet.serving():
                # Nothing can move now: the clock stands still.
                self._progress.moved_s = time.monotonic()
            if not self._progress.is_over:
                cause = self._cause_to_fail()
                if cause:
                    self._progress.fail(cause)

    def _cause_to_fail(self) -> str:
        settings, now = self._config.controller, time.monotonic()
        training = self._environments.training()
        suspended = environment_pb2.ENVIRONMENT_STATE_SUSPENDED
        if training and all(entry.state == suspended for entry in training):
            causes = "; ".join(f"{entry.spec.name}: {entry.cause}" for entry in training)
            return f"no environment is left: {causes}"
        unloadable = [entry for entry in training if self._nowhere(entry)]
        if training and len(unloadable) == len(training):
            causes = "; ".join(f"{entry.spec.name}: {entry.cause}" for entry in training)
            return f"no environment could be loaded: {causes}"
        if not self._fleet.sessions:
            empty = now - self._fleet.empty_since_s
            if empty > settings.fleet_timeout_s:
                return f"no rollout server was connected for {empty:.0f} s"
            return ""
        idle = now - self._progress.moved_s
        waits_for_fleet = self._progress.trainer_registered and bool(self._fleet.serving())
        if waits_for_fleet and training and idle > settings.stall_timeout_s:
            return f"nothing moved for {idle:.0f} s while waiting for {self._progress.waiting_for}"
        return ""

    def _nowhere(self, entry: EnvironmentEntry) -> bool:
        sessions = self._fleet.sessions.values()
        return (
            entry.client_episodes is None
            and not entry.loaded_on
            and bool(sessions)
            and all(session.key in entry.failed_on for session in sessions)
        )
