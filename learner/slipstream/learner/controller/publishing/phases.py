"""Reports on the phases of a publish, and whoever waits for them.

Waits for: the report of one server on one phase. Unblocked by: it, a failure of that server, or the
limit of the wait.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from slipstream.learner.controller.loop_clock import LoopClock
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.v1 import fleet_pb2

# The reports of one server, by publish and phase.
Expectations: TypeAlias = dict[tuple[str, int], asyncio.Future[fleet_pb2.PublishReport]]

FAILED = fleet_pb2.PUBLISH_PHASE_FAILED
# What a report of a phase says.
SAID = {
    fleet_pb2.PUBLISH_PHASE_READY: (fleet_pb2.PUBLISH_PHASE_READY,),
    fleet_pb2.PUBLISH_PHASE_LOADED: (fleet_pb2.PUBLISH_PHASE_LOADED,),
    fleet_pb2.PUBLISH_PHASE_SERVING: (
        fleet_pb2.PUBLISH_PHASE_LOADED,
        fleet_pb2.PUBLISH_PHASE_SERVING,
    ),
}


class PhaseReports:
    """Open expectations: each server has few, so a report is matched against these alone."""

    def __init__(self, clock: LoopClock) -> None:
        """Limits are measured by `clock`."""
        self._clock = clock
        self._open: dict[ServerKey, Expectations] = {}

    def expect(
        self, publish_id: str, server: ServerKey, phase: int
    ) -> asyncio.Future[fleet_pb2.PublishReport]:
        """Keeps the report for a later `wait`, should it come before."""
        future: asyncio.Future[fleet_pb2.PublishReport]
        future = asyncio.get_running_loop().create_future()
        return self._open.setdefault(server, {}).setdefault((publish_id, phase), future)

    def forget(self, publish_id: str, server: ServerKey, phase: int) -> None:
        """Nobody will wait for it."""
        expected = self._open.get(server, {})
        expected.pop((publish_id, phase), None)
        if not expected:
            self._open.pop(server, None)

    def has_failed(self, publish_id: str, server: ServerKey, phase: int) -> bool:
        """Whether what is expected will not come."""
        future = self._open.get(server, {}).get((publish_id, phase))
        return future is not None and future.done() and future.result().phase == FAILED

    async def wait(
        self, publish_id: str, server: ServerKey, phase: int, limit_s: float
    ) -> fleet_pb2.PublishReport:
        """The report, or one of phase FAILED when there is none within `limit_s`."""
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
        """Hands a report on; a failure ends every wait of its publish for that server."""
        failed, said = report.phase == FAILED, SAID.get(report.phase, ())
        for (publish_id, phase), future in self._open.get(server, {}).items():
            concerned = publish_id == report.publish_id
            if concerned and (failed or phase in said) and not future.done():
                future.set_result(report)

    def give_up(self, publish_id: str, server: ServerKey, message: str) -> None:
        """Ends every wait of a publish for a server, and forgets what nobody waits for."""
        report = fleet_pb2.PublishReport(publish_id=publish_id, phase=FAILED, message=message)
        self.receive(server, report)
        for name, phase in list(self._open.get(server, {})):
            if name == publish_id:
                self.forget(publish_id, server, phase)

    def fail_all(self, server: ServerKey, message: str) -> None:
        """Ends every wait for a server."""
        for publish_id in {name for name, _ in self._open.get(server, {})}:
            report = fleet_pb2.PublishReport(publish_id=publish_id, phase=FAILED, message=message)
            self.receive(server, report)
