"""Reports on the phases of a publish, and whoever waits for them.

Waits for: the report of one server on one phase. Unblocked by: it, a failure of that server, or the
limit of the wait.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from slipstream.learner.controller.leasing.groups import ServerKey
from slipstream.v1 import fleet_pb2

ReportKey: TypeAlias = tuple[str, ServerKey, int]

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
    """Open expectations, by publish, server and phase."""

    def __init__(self) -> None:
        self._open: dict[ReportKey, asyncio.Future[fleet_pb2.PublishReport]] = {}

    def expect(
        self, publish_id: str, server: ServerKey, phase: int
    ) -> asyncio.Future[fleet_pb2.PublishReport]:
        """Keeps the report for a later `wait`, should it come before."""
        future: asyncio.Future[fleet_pb2.PublishReport]
        future = asyncio.get_running_loop().create_future()
        return self._open.setdefault((publish_id, server, phase), future)

    def forget(self, publish_id: str, server: ServerKey, phase: int) -> None:
        """Nobody will wait for it."""
        self._open.pop((publish_id, server, phase), None)

    def has_failed(self, publish_id: str, server: ServerKey, phase: int) -> bool:
        """Whether what is expected will not come."""
        future = self._open.get((publish_id, server, phase))
        return future is not None and future.done() and future.result().phase == FAILED

    async def wait(
        self, publish_id: str, server: ServerKey, phase: int, limit_s: float
    ) -> fleet_pb2.PublishReport:
        """The report, or one of phase FAILED when there is none within `limit_s`."""
        future = self.expect(publish_id, server, phase)
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            message = f"no answer within {limit_s:g} s"
            return fleet_pb2.PublishReport(publish_id=publish_id, phase=FAILED, message=message)
        finally:
            self.forget(publish_id, server, phase)

    def receive(self, server: ServerKey, report: fleet_pb2.PublishReport) -> None:
        """Hands a report on; a failure ends every wait of its publish for that server."""
        failed, said = report.phase == FAILED, SAID.get(report.phase, ())
        for (publish_id, key, phase), future in self._open.items():
            concerned = (publish_id, key) == (report.publish_id, server)
            if concerned and (failed or phase in said) and not future.done():
                future.set_result(report)

    def give_up(self, publish_id: str, server: ServerKey, message: str) -> None:
        """Ends every wait of a publish for a server, and forgets what nobody waits for."""
        report = fleet_pb2.PublishReport(publish_id=publish_id, phase=FAILED, message=message)
        self.receive(server, report)
        for key in [key for key in self._open if key[:2] == (publish_id, server)]:
            del self._open[key]

    def fail_all(self, server: ServerKey, message: str) -> None:
        """Ends every wait for a server."""
        for publish_id in {name for name, key, _ in self._open if key == server}:
            report = fleet_pb2.PublishReport(publish_id=publish_id, phase=FAILED, message=message)
            self.receive(server, report)
