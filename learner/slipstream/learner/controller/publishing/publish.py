"""Publishes new weights in two phases; no server serves weights that were not loaded whole.

Consumes: publish reports of servers, start and result of the trainer. Produces: publish orders.
Waits for: each phase of each receiver, with a deadline; the trainer waits at most
`bucket_deadline_s`. Unblocked by: the receiver's report, its loss, or the deadline. A receiver that
misses its deadline is stale: it serves nothing until it is sent the weights again after a later
step.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.publishing.delivery import Deliveries, Publish
from slipstream.learner.controller.publishing.phases import FAILED, LOADED, READY, PhaseReports
from slipstream.learner.controller.publishing.transport_choice import choose_for
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.server_states import JOINING, STALE, ServerKey
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.protocol.codec import version_from_pb, version_to_pb
from slipstream.protocol.weights.buckets import num_tensors
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2


@dataclass(eq=False)
class _Question:
    publish_id: str
    session: ServerSession
    asked_s: float
    answer: asyncio.Future[fleet_pb2.PublishReport]
    # A publish left the server out while the question was open.
    is_late: bool = False

    @property
    def is_open(self) -> bool:
        return not self.answer.done()


class Readiness:
    """Asks servers whether they are ready for a publish; each has at most one open question.

    `ask` sends the question. `answers` returns the answer for the next publish and forgets the
    question. If the server has not answered after `bucket_deadline_s`, the publish leaves the
    server out and `is_late` is true until the server answers; then the next publish may include it.
    Without an answer within `join_deadline_s` the controller ends the server's stream.
    """

    def __init__(
        self, run: Run, tasks: asyncio.TaskGroup, reports: PhaseReports, deliveries: Deliveries
    ) -> None:
        self._run, self._settings = run, run.config.weights
        self._tasks, self._reports, self._deliveries = tasks, reports, deliveries
        self._questions: dict[ServerKey, _Question] = {}

    def is_late(self, session: ServerSession) -> bool:
        """Whether a publish left this server out, and it has still not answered."""
        question = self._questions.get(session.key)
        return question is not None and question.is_late and question.is_open

    def ask(
        self, targets: Sequence[ServerSession], publish_id: str, version: PolicyVersion
    ) -> None:
        """Asks these servers if they are ready, except servers whose question is still open."""
        message = fleet_pb2.ControllerMessage(
            prepare=fleet_pb2.PreparePublish(publish_id=publish_id, version=version_to_pb(version))
        )
        for session in targets:
            earlier = self._questions.get(session.key)
            if earlier is not None and earlier.is_open:
                continue
            self.forget(session)
            answer = self._reports.expect(publish_id, session.key, READY)
            now_s = self._run.clock.now_s()
            self._questions[session.key] = _Question(publish_id, session, now_s, answer)
            session.send(message)

    async def answers(
        self, targets: Sequence[ServerSession], publish_id: str, version: PolicyVersion
    ) -> dict[ServerKey, str]:
        """Returns the answer of each server that answered: why it stays out, or "" if it is ready.

        Servers that were not asked before are asked now. Waits until `bucket_deadline_s` after the
        newest open question; servers that have not answered by then are left out of this publish.
        """
        unasked = [session for session in targets if session.key not in self._questions]
        self.ask(unasked, publish_id, version)
        questions = [self._questions[session.key] for session in targets]
        if unanswered := [question for question in questions if question.is_open]:
            clock = self._run.clock
            until_s = max(q.asked_s for q in unanswered) + self._settings.bucket_deadline_s
            await clock.wait([q.answer for q in unanswered], until_s - clock.now_s())
        problems = {}
        for question in questions:
            if question.is_open:
                self._leave_out(question, version)
                continue
            if self._questions.get(question.session.key) is question:
                self.forget(question.session)
            report = question.answer.result()
            ready = report.phase == READY
            problems[question.session.key] = "" if ready else report.message or "it failed"
        return problems

    def _leave_out(self, question: _Question, version: PolicyVersion) -> None:
        session, question.is_late = question.session, True
        keeps = "it serves nothing yet"
        if session.is_serving and session.version is not None:
            keeps = f"it keeps version {session.version.step}"
        waited_s = self._run.clock.now_s() - question.asked_s
        self._run.events.warn(
            f"rollout server {session.name} is left out of the publish of version {version.step}: "
            f"not ready {waited_s:.1f} s after it was asked; {keeps}"
        )
        self._tasks.create_task(self._follow(question))

    async def _follow(self, question: _Question) -> None:
        """Waits for a late answer, then wakes the run; ends the server's stream if none comes."""
        limit_s = self._settings.join_deadline_s
        clock = self._run.clock
        await clock.wait([question.answer], question.asked_s + limit_s - clock.now_s())
        if not question.is_open:
            self._run.signal.notify()
            return
        self.forget(question.session)
        if not question.session.is_leaving:
            self._deliveries.send_away(
                question.session,
                f"it did not say within {limit_s:g} s (weights.join_deadline_s) "
                "that it is ready for new weights",
            )

    def forget(self, session: ServerSession) -> None:
        """Forgets the question to a server."""
        question = self._questions.pop(session.key, None)
        if question is not None:
            self._reports.forget(question.publish_id, session.key, READY)


class Publisher:
    """Decides which servers are sent the newest version and follows each publish to its end.

    Phases: `prepare` asks the due servers and returns the trainer's order; `start` tells the
    servers to receive, unless `prepare` did so already; `finish` commits and waits until the
    servers have loaded the weights.
    """

    def __init__(self, fleet: Fleet, run: Run, tasks: asyncio.TaskGroup) -> None:
        self._fleet, self._tasks = fleet, tasks
        self._run, self._progress = run, run.progress
        self._settings = run.config.weights
        self._publishes_adapters = run.config.lora.publishes_adapters
        self._reports = PhaseReports(run.clock)
        self.deliveries = Deliveries(fleet, run, tasks, self._reports)
        self._readiness = Readiness(run, tasks, self._reports, self.deliveries)
        self._membership = self.deliveries.membership
        self._num_ids = 0
        self._current: Publish | None = None
        # Servers that hold this trainer's matrices, and may be sent only adapters.
        self._holders: set[ServerKey] = set()
        # Whether the last publish sent only adapters. A publish without `start` uses its layout.
        self._last_was_adapters = False
        self.pinned = fleet.pinned
        self.totals = self.deliveries.totals

    def due(self, version: PolicyVersion | None = None) -> list[ServerSession]:
        """Returns the servers that should be sent `version`, by default the newest, now."""
        newest = version or self._progress.version
        if self._fleet.versions[newest] == len(self._fleet.sessions):
            return []
        return [each for each in self._fleet.fed_by_trainer() if self._is_due(each, newest)]

    def _is_due(self, session: ServerSession, version: PolicyVersion) -> bool:
        if time.monotonic() < session.retry_publish_s or self._readiness.is_late(session):
            return False
        if session.state in (JOINING, STALE):
            return True
        is_pinned = session.key in self.pinned
        return session.is_serving and not is_pinned and session.version != version

    def trainer_joined(self, num_senders: int) -> None:
        """Abandons the previous trainer's publish; `num_senders` ranks of the new trainer send."""
        self.trainer_lost()
        self._membership.num_senders = num_senders

    def trainer_lost(self) -> None:
        """Abandons the current publish, since its trainer is lost."""
        if self._current is not None:
            self._abandon(self._current, "the trainer was lost")
        self._membership.forget()
        self._holders = set()

    def pin(self, session: ServerSession) -> bool:
        """Keeps a server at its version; returns False if a publish to it is already under way."""
        if self._current is not None and session in self._current.receivers:
            return False
        self.pinned.add(session.key)
        return True

    def ask_ahead(self, version: PolicyVersion) -> None:
        """Asks servers if they are ready to receive `version`, before the trainer has made it."""
        self._readiness.ask(self.due(version), self._new_id(), version)

    async def prepare(
        self, trainer: trainer_pb2.NextRequest | None = None
    ) -> weights_pb2.PublishOrder | None:
        """Asks the due servers if they are ready; returns the trainer's order.

        Returns None if no server is due and ready. If `trainer` has the digests of its buckets, the
        publish may begin at once: the servers get their orders, with the digests, before the
        trainer sends.
        """
        if self._current is not None:
            # The trainer asks for an order, so it never got the last one.
            self._abandon(self._current, "the trainer does not send")
        trainer = trainer or trainer_pb2.NextRequest()
        targets = self.deliveries.together(self.due())
        if not targets:
            return None
        version, publish_id = self._progress.version, self._new_id()
        ready, transport = await self._ready(targets, publish_id, version)
        if not ready:
            return None
        order = self._membership.order_for(ready, transport, trainer_has=trainer.communicator_id)
        order.publish_id = publish_id
        order.version.CopyFrom(version_to_pb(version))
        order.verify = self._wants_probe(ready)
        order.adapters_alone = self._may_send_adapters(ready)
        order.bucket_deadline_s = self.deliveries.bucket_deadline_s
        order.join_deadline_s = self._settings.join_deadline_s
        self._current = publish = Publish(
            publish_id, version, order.verify, ready, order, holders=self._holders
        )
        if version_from_pb(trainer.version) == version:
            self._begin_if_known(publish, trainer)
        self._await_end(publish, len(publish.digests))
        return order

    async def _ready(
        self, targets: Sequence[ServerSession], publish_id: str, version: PolicyVersion
    ) -> tuple[list[ServerSession], str]:
        """Asks `targets` if they can receive; returns the ready servers and their transport."""
        problems = await self._readiness.answers(targets, publish_id, version)
        answered = [session for session in targets if session.key in problems]
        ready = self._drop(answered, [problems[session.key] for session in answered])
        transport, misfits = choose_for(self._run, {s.name: s.hello.place for s in ready})
        # A server that began to drain meanwhile takes no part.
        return [s for s in self._drop(ready, misfits) if not s.is_leaving], transport

    def _begin_if_known(self, publish: Publish, trainer: trainer_pb2.NextRequest) -> None:
        """Begins a publish at once if layout and digests are known and no probe follows.

        Otherwise the publish begins at `start`. With a probe, the engines would pause while the
        trainer computes it.
        """
        order = publish.order
        has_layout = order.adapters_alone == self._last_was_adapters
        if trainer.bucket_digests and has_layout and not (order.new_communicator or order.verify):
            order.begun = True
            publish.digests = tuple(trainer.bucket_digests)
            self._tell_receivers(publish, None)

    def _await_end(self, publish: Publish, num_buckets: int) -> None:
        """Sets the deadline of this publish; the run fails if the trainer misses it."""
        order, stall_s = publish.order, self._run.config.controller.stall_timeout_s
        limit_s = 2 * order.join_deadline_s + num_buckets * order.bucket_deadline_s
        self._progress.publish_ordered(publish.publish_id, limit_s + stall_s)

    def start(self, start: trainer_pb2.PublishStart) -> list[weights_pb2.Receiver]:
        """Orders all receivers to receive, and returns them; returns [] if a receiver was lost.

        With `start.is_question` nothing is started, and only the receivers that are still connected
        are returned.
        """
        publish = self._current
        if publish is None or publish.publish_id != start.publish_id:
            return []
        if start.is_question:
            there = {
                session.key.server_id
                for session in publish.receivers
                if self._fleet.find(session.key) is session
                and not self._has_failed(publish, session)
            }
            return [r for r in publish.order.receivers if r.server_id in there]
        publish.receivers = [s for s in publish.receivers if self._fleet.find(s.key) is s]
        known = {receiver.server_id: receiver for receiver in publish.order.receivers}
        if len(publish.receivers) < len(known):
            self._abandon(publish, "a receiver was lost")
            return []
        if publish.is_announced:
            # The call was repeated: a server that gets the order twice would join twice.
            return list(known.values())
        publish.order.communicator.CopyFrom(start.communicator)
        self._tell_receivers(publish, start.layout)
        self._await_end(publish, num_tensors(start.layout))
        return list(known.values())

    def _has_failed(self, publish: Publish, session: ServerSession) -> bool:
        report = self._reports.reported(publish.publish_id, session.key, LOADED)
        return report is not None and report.phase == FAILED

    async def finish(self, result: trainer_pb2.PublishResult) -> trainer_pb2.PublishReceipt:
        """Handles the trainer's result: commits servers with the right digests, aborts all others.

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
        if not any(self._fleet.find(s.key) is s for s in publish.receivers):
            # At the end of a run nothing can be followed any more.
            self._abandon(publish, "no receiver is there any more")
            return trainer_pb2.PublishReceipt(discard_communicator=True)
        digests = list(result.bucket_digests)
        if not publish.digests:
            self.deliveries.commit(publish, digests, result.probe)
        try:
            receipt = await self._settle(publish, digests)
        except asyncio.CancelledError:
            # The trainer is gone: without this the servers would stay in LOADING forever.
            self._abandon(publish, "the trainer was lost")
            raise
        self.totals.sent(result)
        self._trace(publish, num_bytes=result.bytes_sent)
        return receipt

    def _trace(self, publish: Publish, *, num_bytes: int = 0, error: str = "") -> None:
        self._run.traces.published(
            publish.publish_id,
            publish.version.step,
            begin_s=publish.ordered_s,
            num_bytes=num_bytes,
            error=error,
        )

    async def _settle(
        self, publish: Publish, digests: Sequence[bytes]
    ) -> trainer_pb2.PublishReceipt:
        """Waits until all receivers have loaded, at most `bucket_deadline_s`; returns the receipt.

        A task awaits the report of a late receiver.
        """
        loads = {
            session.key: self._reports.expect(publish.publish_id, session.key, LOADED)
            for session in publish.receivers
            if session.key not in publish.failed
        }
        await self._run.clock.wait(loads.values(), self._settings.bucket_deadline_s)
        late = {key for key, load in loads.items() if not load.done()}
        for session in publish.receivers:
            if session.key in late:
                self._tasks.create_task(self._follow_load(publish, session, digests))
            elif session.key in loads:
                self._reports.forget(publish.publish_id, session.key, LOADED)
                report = loads[session.key].result()
                self.deliveries.loaded(publish, session, digests, report)
        return self._receipt(publish, late)

    async def _follow_load(
        self, publish: Publish, session: ServerSession, digests: Sequence[bytes]
    ) -> None:
        report = await self._reports.wait(
            publish.publish_id, session.key, LOADED, self._settings.join_deadline_s
        )
        self.deliveries.loaded(publish, session, digests, report)

    def _receipt(self, publish: Publish, late: set[ServerKey]) -> trainer_pb2.PublishReceipt:
        """Returns the receipt; the receivers in `late` have neither loaded nor failed."""
        settled = [session for session in publish.receivers if session.key not in late]
        loaded = [
            session
            for session in settled
            if session.key not in publish.failed and self._fleet.find(session.key) is session
        ]
        for session in publish.receivers:
            if loaded and session.key in late:
                self._run.events.warn(
                    f"rollout server {session.name} still loads version {publish.version.step}: "
                    "the others and the trainer go on"
                )
        is_broken = len(loaded) < len(settled)
        if is_broken:
            self._membership.forget(publish.communicator_id)
        return trainer_pb2.PublishReceipt(
            serving=[session.name for session in loaded], discard_communicator=is_broken
        )

    def report(self, session: ServerSession, report: fleet_pb2.PublishReport) -> None:
        """Passes a server's report to the part that waits for it."""
        self._reports.receive(session.key, report)
        is_served = session.is_serving and report.publish_id == session.publish_id
        if is_served and report.phase == FAILED:
            # The server has itself stopped serving these weights.
            self.deliveries.make_stale(session, report.message)

    def server_lost(self, session: ServerSession) -> None:
        """Ends all waits for a server that was lost."""
        self.pinned.discard(session.key)
        self._membership.server_lost(session.key)
        self._holders.discard(session.key)
        self._reports.fail_all(session.key, "the server is gone")
        self._readiness.forget(session)

    def _wants_probe(self, targets: Sequence[ServerSession]) -> bool:
        fresh = any(not session.is_serving for session in targets)
        anew = self._publishes_adapters and not self._may_send_adapters(targets)
        return fresh or anew or self.totals.publishes % self._settings.verify_every == 0

    def _may_send_adapters(self, targets: Sequence[ServerSession]) -> bool:
        return self._publishes_adapters and all(session.key in self._holders for session in targets)

    def _new_id(self) -> str:
        self._num_ids += 1
        return f"p{self._num_ids:06d}"

    def _drop(
        self, sessions: Sequence[ServerSession], problems: Sequence[str]
    ) -> list[ServerSession]:
        """Makes servers with a problem stale; returns all others that are still connected.

        A serving server that is pinned is neither made stale nor returned. `problems` has a text
        for each session; "" means no problem.
        """
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
            # The receivers have not got an order yet.
            return
        self._trace(publish, error=cause)
        for session in publish.receivers:
            # A server that serves this version keeps it.
            if not (session.is_serving and session.version == publish.version):
                self.deliveries.fail(publish, session, cause)

    def _tell_receivers(self, publish: Publish, layout: weights_pb2.WeightLayout | None) -> None:
        """Orders all receivers to receive; with `layout` None the previous layout still applies."""
        self._last_was_adapters = publish.order.adapters_alone
        if not self._last_was_adapters:
            self._holders -= {session.key for session in publish.receivers}
        self.deliveries.announce(publish, layout)
