"""One version on its way to one server: the commit, what the server made of it, or its failure.

Consumes: a server's reports. Produces: commits, verdicts on probes, aborts. Waits for: the end of
each receiver, with a deadline. Unblocked by: its report, its loss, or a failure of the publish.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.learner.controller.events import Severity
from slipstream.learner.controller.leasing.groups import ServerKey
from slipstream.learner.controller.progress import RunProgress
from slipstream.learner.controller.publishing.membership import Membership
from slipstream.learner.controller.publishing.phases import PhaseReports
from slipstream.learner.controller.publishing.probe_gap import check_probe
from slipstream.learner.controller.publishing.publish_totals import PublishTotals
from slipstream.learner.controller.servers.fleet import Fleet, ServerSession
from slipstream.learner.controller.servers.server_states import ServerEvent
from slipstream.protocol.codec import version_to_pb
from slipstream.protocol.types import PolicyVersion, ServerId
from slipstream.v1 import fleet_pb2, weights_pb2

MAX_RETRY_S = 30.0
# Publishes in a row that a server may fail before it is sent away.
MAX_FAILED_PUBLISHES = 8
# So many in a row may be those of other members; afterwards it is sent weights alone.
MAX_JOINT_FAILURES = 2
# As many while nobody is sent weights with success and nobody serves: then the run stops. By then
# the server was sent away once, and came back.
MAX_VAIN_PUBLISHES = 2 * MAX_FAILED_PUBLISHES


@dataclass(eq=False)
class Publish:
    """One version on its way to some servers."""

    publish_id: str
    version: PolicyVersion
    verify: bool
    receivers: list[ServerSession]
    order: weights_pb2.PublishOrder
    # Of its buckets, where the trainer has said beforehand what it sends; else it says it at last.
    digests: tuple[bytes, ...] = ()
    # Its receivers were told to receive.
    is_announced: bool = False
    # The servers that hold this trainer's matrices, if adapters are published apart.
    holders: set[ServerKey] = field(default_factory=set)
    # Receivers that failed in it.
    failed: set[ServerKey] = field(default_factory=set)

    @property
    def communicator_id(self) -> str:
        """What it travels through; a later publish may have another one."""
        return self.order.communicator.communicator_id


SERVING = fleet_pb2.PUBLISH_PHASE_SERVING


class Deliveries:
    """Follows every receiver of every publish to its end."""

    def __init__(
        self, fleet: Fleet, progress: RunProgress, tasks: asyncio.TaskGroup, reports: PhaseReports
    ) -> None:
        self._fleet, self._progress = fleet, progress
        self._settings = progress.config.weights
        self._tasks, self._reports = tasks, reports
        self.membership = Membership(progress.run_id)
        self.totals = PublishTotals()
        # By server, whichever life of it, since any of them got to serve.
        self._vain: Counter[ServerId] = Counter()
        # The same, since that server itself got to serve.
        self._failed: Counter[ServerId] = Counter()

    def together(self, due: Sequence[ServerSession]) -> list[ServerSession]:
        """Who of them is sent weights in one publish, the others later.

        One member that fails makes all others stale: who failed again and again has a publish of
        its own, behind those that can be trusted.
        """
        sound = [s for s in due if self._failed[s.key.server_id] < MAX_JOINT_FAILURES]
        return sound or sorted(due, key=lambda s: self._failed[s.key.server_id])[:1]

    def commit(
        self,
        publish: Publish,
        session: ServerSession,
        digests: Sequence[bytes],
        probe: weights_pb2.Probe | None,
    ) -> None:
        """Lets a server go on once it has loaded what has these digests."""
        self._reports.expect(publish.publish_id, session.key, SERVING)
        session.send(
            fleet_pb2.ControllerMessage(
                commit=fleet_pb2.CommitPublish(
                    publish_id=publish.publish_id,
                    version=version_to_pb(publish.version),
                    probe=probe if publish.verify else None,
                    bucket_digests=digests,
                )
            )
        )
        # Its buckets may still be on their way, each with its deadline; then it loads and resumes.
        settings = self._settings
        limit_s = 2 * settings.join_deadline_s + len(digests) * settings.bucket_deadline_s
        self._tasks.create_task(self._follow(publish, session, probe, limit_s))

    async def _follow(
        self,
        publish: Publish,
        session: ServerSession,
        probe: weights_pb2.Probe | None,
        limit_s: float,
    ) -> None:
        if session.key in publish.failed:
            # Before this task began: nobody would report anything.
            return
        report = await self._reports.wait(publish.publish_id, session.key, SERVING, limit_s)
        if session.key in publish.failed:
            return
        if report.phase != SERVING:
            self.fail(publish, session, report.message or "it failed")
            return
        self.totals.served(report)
        problem = ""
        if publish.verify:
            assert probe is not None
            problem = check_probe(probe, report, self.totals)
            session.send(
                fleet_pb2.ControllerMessage(
                    probe_verdict=fleet_pb2.ProbeVerdict(
                        publish_id=publish.publish_id, passed=not problem, message=problem
                    )
                )
            )
        if problem:
            self.membership.forget(publish.communicator_id)
            # Nobody knows which part was wrong.
            publish.holders.discard(session.key)
            self.make_stale(session, problem)
        else:
            if not publish.order.adapters_alone:
                publish.holders.add(session.key)
            session.failed_publishes = 0
            self._vain.clear()
            del self._failed[session.key.server_id]
            session.version = publish.version
            if not session.is_leaving:
                session.cause = ""
            session.publish_id = publish.publish_id
            session.on(ServerEvent.PUBLISHED)
        self._progress.signal.notify()

    def fail(self, publish: Publish, session: ServerSession, cause: str) -> None:
        """Once for each receiver, whoever notices it first."""
        if session.key in publish.failed:
            return
        publish.failed.add(session.key)
        self.membership.forget(publish.communicator_id)
        self.make_stale(session, cause, publish.publish_id)
        self._reports.give_up(publish.publish_id, session.key, cause)

    def make_stale(self, session: ServerSession, cause: str, publish_id: str = "") -> None:
        """It serves nothing until it has a complete version; `publish_id` is aborted there."""
        if publish_id:
            session.send(
                fleet_pb2.ControllerMessage(
                    abort=fleet_pb2.AbortPublish(publish_id=publish_id, reason=cause)
                )
            )
        if self._fleet.find(session.key) is not session:
            return
        session.failed_publishes += 1
        session.on(ServerEvent.FAILED)
        if session.is_leaving:
            return
        session.cause = cause
        wait_s = min(0.5 * 2**session.failed_publishes, MAX_RETRY_S)
        session.retry_publish_s = time.monotonic() + wait_s
        self._progress.events.add(
            f"rollout server {session.name} is stale: {cause}", Severity.WARNING
        )
        if session.failed_publishes >= MAX_FAILED_PUBLISHES:
            self._disconnect(session, f"{session.failed_publishes} publishes failed: {cause}")
        self._note_in_vain(session, cause)

    def send_away(self, session: ServerSession, cause: str) -> None:
        """No publish reaches it: what it runs goes on elsewhere, and it may join again."""
        self._disconnect(session, cause)
        self._note_in_vain(session, cause)

    def _disconnect(self, session: ServerSession, cause: str) -> None:
        session.disconnect()
        self._fleet.remove(session, cause)

    def _note_in_vain(self, session: ServerSession, cause: str) -> None:
        self._vain[session.key.server_id] += 1
        self._failed[session.key.server_id] += 1
        times = self._vain[session.key.server_id]
        if times >= MAX_VAIN_PUBLISHES and not (self._fleet.serving() or self._progress.is_over):
            self._progress.fail(
                f"no rollout server serves, and {times} publishes in a row to {session.name} "
                f"failed, the last one: {cause}"
            )
