"""The end of a publish that the trainer has sent: each receiver loads it or fails.

Consumes: reports of the receivers. Produces: the trainer's receipt. Waits for: all receivers, for
`bucket_deadline_s`; slower receivers are followed while the trainer trains. Unblocked by: the
report of a receiver, its loss, or the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slipstream.learner.controller.events import Severity
from slipstream.learner.controller.publishing.delivery import Deliveries, Publish
from slipstream.learner.controller.publishing.phases import FAILED, LOADED
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.v1 import trainer_pb2


class Loads:
    """Follows the receivers of a publish until they have loaded what the trainer sent."""

    def __init__(
        self, fleet: Fleet, run: Run, tasks: asyncio.TaskGroup, *, deliveries: Deliveries
    ) -> None:
        self._fleet, self._run, self._tasks = fleet, run, tasks
        self._settings, self._deliveries = run.config.weights, deliveries

    async def settle(
        self, publish: Publish, digests: Sequence[bytes]
    ) -> trainer_pb2.PublishReceipt:
        """Waits for the loads of buckets with these digests; returns the trainer's receipt."""
        loads = [
            self._tasks.create_task(self._follow(publish, session, digests))
            for session in publish.receivers
        ]
        await self._run.clock.wait(loads, self._settings.bucket_deadline_s)
        return self._receipt(publish, [load.done() for load in loads])

    async def _follow(
        self, publish: Publish, session: ServerSession, digests: Sequence[bytes]
    ) -> None:
        problem = await self._problem(publish, session, digests)
        if problem:
            self._deliveries.fail(publish, session, problem)

    async def _problem(
        self, publish: Publish, session: ServerSession, digests: Sequence[bytes]
    ) -> str:
        if session.key in publish.failed:
            return "it failed"
        report = await self._deliveries.reports.wait(
            publish.publish_id, session.key, LOADED, self._settings.join_deadline_s
        )
        if report.phase == FAILED:
            return report.message or "it failed"
        if list(report.bucket_digests) != list(digests):
            return "the digests of the loaded buckets are not those that were sent"
        return ""

    def _receipt(self, publish: Publish, is_settled: Sequence[bool]) -> trainer_pb2.PublishReceipt:
        """Returns the receipt; `is_settled` says for each receiver if it has loaded or failed."""
        settled: list[ServerSession] = []
        late: list[ServerSession] = []
        for session, is_done in zip(publish.receivers, is_settled, strict=True):
            (settled if is_done else late).append(session)
        loaded = [
            session
            for session in settled
            if session.key not in publish.failed and self._fleet.find(session.key) is session
        ]
        for session in late if loaded else ():
            self._run.events.add(
                f"rollout server {session.name} still loads version {publish.version.step}: "
                "the others and the trainer go on",
                Severity.WARNING,
            )
        is_broken = len(loaded) < len(settled)
        if is_broken:
            self._deliveries.membership.forget(publish.communicator_id)
        return trainer_pb2.PublishReceipt(
            serving=[session.name for session in loaded], discard_communicator=is_broken
        )
