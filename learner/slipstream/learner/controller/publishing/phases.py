"""Reports on the phases of a publish, and the tasks that wait for them.

Waits for: the report of one server on one phase. Unblocked by: that report, a failure of the
server, or the limit of the wait.
"""

import asyncio
from typing import TypeAlias

from slipstream.learner.controller.loop_clock import LoopClock
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.v1 import fleet_pb2

Wait: TypeAlias = asyncio.Future[fleet_pb2.PublishReport]
# The reports of one server, by publish and phase.
Expectations: TypeAlias = dict[tuple[str, int], Wait]

READY = fleet_pb2.PUBLISH_PHASE_READY
LOADED = fleet_pb2.PUBLISH_PHASE_LOADED
SERVING = fleet_pb2.PUBLISH_PHASE_SERVING
FAILED = fleet_pb2.PUBLISH_PHASE_FAILED
# The phases that a server has reached when it reports a phase.
REACHED = {READY: (READY,), LOADED: (LOADED,), SERVING: (LOADED, SERVING)}


class PhaseReports:
    """The reports for which the controller waits, by server, publish and phase."""

    def __init__(self, clock: LoopClock) -> None:
        """Takes the clock by which waits reach their time limits."""
        self._clock = clock
        self._open: dict[ServerKey, Expectations] = {}

    def expect(self, publish_id: str, server: ServerKey, phase: int) -> Wait:
        """Expects a report, which may come before `wait` is called; returns its future."""
        future: Wait = asyncio.get_running_loop().create_future()
        return self._open.setdefault(server, {}).setdefault((publish_id, phase), future)

    def forget(self, publish_id: str, server: ServerKey, phase: int) -> None:
        """Stops expecting a report."""
        expected = self._open.get(server, {})
        expected.pop((publish_id, phase), None)
        if not expected:
            self._open.pop(server, None)

    def reported(
        self, publish_id: str, server: ServerKey, phase: int
    ) -> fleet_pb2.PublishReport | None:
        """Returns the expected report, or None if it has not arrived or is not expected."""
        future = self._open.get(server, {}).get((publish_id, phase))
        return future.result() if future is not None and future.done() else None

    async def wait(
        self, publish_id: str, server: ServerKey, phase: int, limit_s: float
    ) -> fleet_pb2.PublishReport:
        """Returns the report, or a report of phase FAILED if none arrives within `limit_s`."""
        future = self.expect(publish_id, server, phase)
        try:
            await self._clock.wait([future], limit_s)
        finally:
            self.forget(publish_id, server, phase)
        if future.done():
            return future.result()
        message = f"no answer within {limit_s:g} s"
        return fleet_pb2.PublishReport(publish_id=publish_id, phase=FAILED, message=message)

    def receive(self, server: ServerKey, report: fleet_pb2.PublishReport) -> None:
        """Completes the waits for `report`; a FAILED report completes all waits of its publish."""
        failed, reached = report.phase == FAILED, REACHED.get(report.phase, ())
        for (publish_id, phase), future in self._open.get(server, {}).items():
            is_its_publish = publish_id == report.publish_id
            if is_its_publish and (failed or phase in reached) and not future.done():
                future.set_result(report)

    def abandon(self, publish_id: str, server: ServerKey, message: str) -> None:
        """Ends all waits of a publish for a server as failed, and stops expecting their reports."""
        report = fleet_pb2.PublishReport(publish_id=publish_id, phase=FAILED, message=message)
        self.receive(server, report)
        for name, phase in list(self._open.get(server, {})):
            if name == publish_id:
                self.forget(publish_id, server, phase)

    def fail_all(self, server: ServerKey, message: str) -> None:
        """Ends all waits for a server as failed."""
        for publish_id in {name for name, _ in self._open.get(server, {})}:
            report = fleet_pb2.PublishReport(publish_id=publish_id, phase=FAILED, message=message)
            self.receive(server, report)
