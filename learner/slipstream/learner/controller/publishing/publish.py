"""Publishes new weights in two phases; no server serves weights that were not loaded whole.

Consumes: publish reports of servers, start and result of the trainer. Produces: publish orders.
Waits for: each phase of each receiver, with a deadline; the trainer waits at most
`bucket_deadline_s`. Unblocked by: the receiver's report, its loss, or the deadline. A receiver that
misses its deadline is stale: it serves nothing and is sent the weights again between later steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from slipstream.learner.controller.events import Severity
from slipstream.learner.controller.publishing.delivery import Deliveries, Publish, can_take
from slipstream.learner.controller.publishing.phases import FAILED, PhaseReports
from slipstream.learner.controller.publishing.readiness import Readiness
from slipstream.learner.controller.publishing.transport_choice import choose_for
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.server_states import (
    JOINING,
    STALE,
    ServerEvent,
    ServerKey,
)
from slipstream.learner.controller.servers.session import JoinedOrder, ServerSession
from slipstream.protocol.codec import version_from_pb, version_to_pb
from slipstream.protocol.types import PolicyVersion
from slipstream.protocol.weights.buckets import num_tensors
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2

LOADED = fleet_pb2.PUBLISH_PHASE_LOADED


class Publisher:
    """Decides which servers are sent the newest version and follows each publish to its end.

    Phases: `prepare` asks the due servers and returns the trainer's order; `start` tells them to
    receive, unless `prepare` did so already; `finish` commits and waits until they have loaded.
    """

    def __init__(self, fleet: Fleet, run: Run, tasks: asyncio.TaskGroup) -> None:
        self._fleet = fleet
        self._run, self._progress = run, run.progress
        self._settings = run.config.weights
        self._apart = run.config.lora.publishes_adapters
        self._tasks, self._reports = tasks, PhaseReports(run.clock)
        self.deliveries = Deliveries(fleet, run, tasks, self._reports)
        self._readiness = Readiness(run, tasks, self._reports, self.deliveries)
        self._membership = self.deliveries.membership
        self._count = 0
        self._current: Publish | None = None
        # Servers that hold this trainer's matrices, and may be sent only adapters.
        self._holders: set[ServerKey] = set()
        # Whether the last publish sent only adapters: a publish without `start` has its layout.
        self._was_alone = False
        self.pinned = fleet.pinned
        self.totals = self.deliveries.totals

    def due(self, version: PolicyVersion | None = None) -> list[ServerSession]:
        """Returns the servers that should be sent `version` now; None: the newest version."""
        version, every = version or self._progress.version, self._settings.publish_every_steps
        regular = version.step % every == 0 or self._progress.all_steps_done
        return [
            session
            for session in self._fleet.fed_by_trainer()
            if time.monotonic() >= session.retry_publish_s
            and not self._readiness.is_late(session)
            and (
                (
                    session.is_serving
                    and session.key not in self.pinned
                    and self._is_behind(session, version, regular=regular)
                )
                or session.state in (JOINING, STALE)
            )
        ]

    def _is_behind(self, session: ServerSession, version: PolicyVersion, *, regular: bool) -> bool:
        assert session.version is not None
        # Weights of an abandoned timeline are not the learner's.
        wanted = regular or session.version.incarnation != version.incarnation
        return wanted and session.version != version

    def trainer_joined(self, num_senders: int) -> None:
        """Takes over from the earlier trainer; the new one sends from `num_senders` ranks."""
        self.trainer_lost()
        self._membership.num_senders = num_senders

    def trainer_lost(self) -> None:
        """Abandons the publish under way: its trainer sends no more."""
        if self._current is not None:
            self._abandon(self._current, "the trainer was lost")
        self._membership.forget()
        self._holders = set()

    def pin(self, session: ServerSession) -> bool:
        """Lets a server keep its version; False if it already has an order for another one."""
        if self._current is not None and session in self._current.receivers:
            return False
        self.pinned.add(session.key)
        return True

    def ask_ahead(self, version: PolicyVersion) -> None:
        """Asks the servers that will be due once the trainer has made `version`."""
        self._readiness.ask(self.due(version), self._new_id(), version)

    async def prepare(
        self, trainer: trainer_pb2.NextRequest | None = None
    ) -> weights_pb2.PublishOrder | None:
        """Asks the due servers if they are ready; returns the trainer's order, or None.

        If `trainer` names its digests, the publish begins with the order: before the trainer is
        told to send, the servers are told to receive, and which digests to expect.
        """
        if self._current is not None:
            # The trainer asks for an order, so it never got the last one.
            self._abandon(self._current, "the trainer does not send")
        trainer = trainer or trainer_pb2.NextRequest()
        targets = self.deliveries.together(self.due())
        if not targets:
            return None
        version, publish_id = self._progress.version, self._new_id()
        problems = await self._readiness.answers(targets, publish_id, version)
        answered = [session for session in targets if session.key in problems]
        ready = self._drop(answered, [problems[session.key] for session in answered])
        transport, misfits = choose_for(self._run, {s.name: s.hello.place for s in ready})
        # A server that began to drain meanwhile takes no part.
        ready = [s for s in self._drop(ready, misfits) if not s.is_leaving]
        if not ready:
            return None
        order = self._membership.order_for(ready, transport, trainer_has=trainer.communicator_id)
        order.publish_id = publish_id
        order.version.CopyFrom(version_to_pb(version))
        order.verify = self._wants_probe(ready)
        order.adapters_alone = self._may_send_adapters(ready)
        order.bucket_deadline_s = self._settings.bucket_deadline_s
        order.join_deadline_s = self._settings.join_deadline_s
        self._current = publish = Publish(
            publish_id, version, order.verify, ready, order, holders=self._holders
        )
        # With a probe the publish does not begin here: engines would pause while it is scored.
        is_known = version_from_pb(trainer.version) == version
        if is_known and can_take(trainer.delta, ready):
            order.delta.CopyFrom(trainer.delta)
        is_known &= bool(trainer.bucket_digests) and order.adapters_alone == self._was_alone
        if is_known and not order.new_communicator and not order.verify:
            order.begun = True
            publish.digests = tuple(trainer.bucket_digests)
            self._tell_receivers(publish, None)
        self._await_end(publish, len(publish.digests))
        return order

    def _await_end(self, publish: Publish, num_buckets: int) -> None:
        """Sets the limit by which the trainer must end this publish, or the run fails."""
        settings, stall_s = self._settings, self._run.config.controller.stall_timeout_s
        limit_s = 2 * settings.join_deadline_s + num_buckets * settings.bucket_deadline_s
        self._progress.publish_ordered(publish.publish_id, limit_s + stall_s)

    def start(self, start: trainer_pb2.PublishStart) -> list[weights_pb2.Receiver]:
        """Tells all receivers to receive and returns them; returns none if a receiver was lost."""
        publish = self._current
        if publish is None or publish.publish_id != start.publish_id:
            return []
        if start.is_question:  # The trainer asks which receivers are neither gone nor failed.
            return self._still_there(publish)
        publish.receivers = [s for s in publish.receivers if self._fleet.find(s.key) is s]
        known = {receiver.server_id: receiver for receiver in publish.order.receivers}
        if len(publish.receivers) < len(known):
            self._abandon(publish, "a receiver was lost")
            return []
        if publish.is_announced:
            # The call was repeated: a server that is told twice would join twice.
            return list(known.values())
        publish.order.communicator.CopyFrom(start.communicator)
        self._tell_receivers(publish, start.layout)
        self._await_end(publish, num_tensors(start.layout))
        return list(known.values())

    def _still_there(self, publish: Publish) -> list[weights_pb2.Receiver]:
        """Returns the receivers that are neither gone nor failed."""
        there = {
            session.key.server_id
            for session in publish.receivers
            if self._fleet.find(session.key) is session
            and not self._reports.has_failed(publish.publish_id, session.key, LOADED)
        }
        return [r for r in publish.order.receivers if r.server_id in there]

    async def finish(self, result: trainer_pb2.PublishResult) -> trainer_pb2.PublishReceipt:
        """Takes the trainer's result: commits servers whose digests agree, aborts on the others.

        Returns when all receivers have loaded, or after `bucket_deadline_s`. Slower receivers are
        followed to their end while the trainer trains.
        """
        publish, self._current = self._current, None
        self._progress.publish_ended()
        if publish is None or publish.publish_id != result.publish_id:
            # The call was repeated: the trainer must leave the communicator.
            self._membership.forget()
            return trainer_pb2.PublishReceipt(discard_communicator=True)
        if result.error:
            self._abandon(publish, f"the learner could not send: {result.error}")
            return trainer_pb2.PublishReceipt(discard_communicator=True)
        if publish.digests not in ((), tuple(result.bucket_digests)):
            self._abandon(publish, "the learner sent something else than it had said")
            return trainer_pb2.PublishReceipt(discard_communicator=True)
        digests = list(result.bucket_digests)
        if not publish.digests:
            for session in publish.receivers:
                self.deliveries.commit(publish, session, digests, result.probe)
        loads = [
            self._tasks.create_task(self._follow_load(publish, session, digests))
            for session in publish.receivers
        ]
        try:
            await self._run.clock.wait(loads, self._settings.bucket_deadline_s)
        except asyncio.CancelledError:
            # The trainer is gone: without this the servers would stay in LOADING for ever.
            self._abandon(publish, "the trainer was lost")
            raise
        self.totals.sent(result)
        return self._receipt(publish, [load.done() for load in loads])

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
            self._membership.forget(publish.communicator_id)
        return trainer_pb2.PublishReceipt(
            serving=[session.name for session in loaded], discard_communicator=is_broken
        )

    def report(self, session: ServerSession, report: fleet_pb2.PublishReport) -> None:
        """Hands a server's report to the part that waits for it."""
        self._reports.receive(session.key, report)
        is_served = session.is_serving and report.publish_id == session.publish_id
        if is_served and report.phase == fleet_pb2.PUBLISH_PHASE_FAILED:
            # The server has itself stopped serving these weights.
            self.deliveries.make_stale(session, report.message)

    def server_lost(self, session: ServerSession) -> None:
        """Ends all waits for a server that is gone."""
        self.pinned.discard(session.key)
        self._membership.server_lost(session.key)
        self._holders.discard(session.key)
        self._reports.fail_all(session.key, "the server is gone")
        self._readiness.server_lost(session)

    def _wants_probe(self, targets: Sequence[ServerSession]) -> bool:
        fresh = any(not session.is_serving for session in targets)
        anew = self._apart and not self._may_send_adapters(targets)
        return fresh or anew or self.totals.publishes % self._settings.verify_every == 0

    def _may_send_adapters(self, targets: Sequence[ServerSession]) -> bool:
        return self._apart and all(session.key in self._holders for session in targets)

    def _new_id(self) -> str:
        self._count += 1
        return f"p{self._count:06d}"

    async def _follow_load(
        self, publish: Publish, session: ServerSession, digests: list[bytes]
    ) -> None:
        problem = await self._load_problem(publish, session, digests)
        if problem:
            self.deliveries.fail(publish, session, problem)

    async def _load_problem(
        self, publish: Publish, session: ServerSession, digests: list[bytes]
    ) -> str:
        if session.key in publish.failed:
            return "it failed"
        limit_s = self._settings.join_deadline_s
        report = await self._reports.wait(publish.publish_id, session.key, LOADED, limit_s)
        if report.phase == FAILED:
            return report.message or "it failed"
        if list(report.bucket_digests) != digests:
            return "the digests of the loaded buckets are not those that were sent"
        return ""

    def _drop(
        self, sessions: Sequence[ServerSession], problems: Sequence[str]
    ) -> list[ServerSession]:
        kept = []
        for session, problem in zip(sessions, problems, strict=True):
            if session.is_serving and session.key in self.pinned:
                # The server was pinned after it was asked.
                continue
            if problem:
                self.deliveries.make_stale(session, problem)
            elif self._fleet.find(session.key) is session:
                kept.append(session)
        return kept

    def _abandon(self, publish: Publish, cause: str) -> None:
        if self._current is publish:
            # Not always the current one: while a publish is finished, the next may have begun.
            self._current = None
            self._progress.publish_ended()
        self._membership.forget(publish.communicator_id)
        if not publish.is_announced:
            # The receivers were told nothing yet.
            return
        for session in publish.receivers:
            # A server that serves this version keeps it.
            if not (session.is_serving and session.version == publish.version):
                self.deliveries.fail(publish, session, cause)

    def _tell_receivers(self, publish: Publish, layout: weights_pb2.WeightLayout | None) -> None:
        """Tells all receivers to receive; with `layout` None the earlier layout holds."""
        publish.is_announced = True
        self._was_alone = publish.order.adapters_alone
        if not self._was_alone:
            self._holders -= {session.key for session in publish.receivers}
        ranks = {r.server_id: r.first_rank for r in publish.order.receivers}
        # A server needs to know only its own rank.
        order = weights_pb2.PublishOrder()
        order.CopyFrom(publish.order)
        order.ClearField("receivers")
        common = fleet_pb2.ControllerMessage()
        if layout is not None:
            common.receive.layout.CopyFrom(layout)
        shared = common.SerializeToString()
        publish.told_s = time.monotonic()
        for session in publish.receivers:
            # A server may have loaded before the trainer reports its result.
            self._reports.expect(publish.publish_id, session.key, LOADED)
            session.on(ServerEvent.RECEIVE)
            own = fleet_pb2.ReceiveWeights(order=order, first_rank=ranks[session.key.server_id])
            session.send(JoinedOrder(fleet_pb2.ControllerMessage(receive=own), shared))
            if publish.digests:
                self.deliveries.commit(publish, session, publish.digests, None)
