"""Publishes new weights in two phases; no server serves weights that were not loaded whole.

    the trainer's calls: Next       StartPublish      FinishPublish          its receipt
    the publisher:       `prepare`  `start`           `finish` ------------>
    each server:         ask, READY receive ... LOADED, commit ... SERVING, verdict

If the trainer has said the digests of its buckets in `Next`, `prepare` also does what `start` and
the commit do: servers receive while the trainer begins to send.

Consumes: publish reports of servers, start and result of the trainer. Produces: publish orders.
Waits for: each phase of each receiver, with a deadline; the trainer waits at most
`bucket_deadline_s`. Unblocked by: the receiver's report, its loss, or the deadline. A receiver that
misses its deadline is stale: it serves nothing until it is sent the weights again after a later
step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TypeAlias

from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.part import Part
from slipstream.learner.controller.publishing.receivers import (
    FAILED,
    Failures,
    Membership,
    PublishQuestions,
    choose_for,
)
from slipstream.learner.controller.publishing.totals import PublishTotals, check_probe
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import (
    JOINING,
    LOADING,
    SERVING,
    STALE,
    JoinedOrder,
    ServerKey,
    ServerSession,
)
from slipstream.protocol.codec import version_from_pb, version_to_pb
from slipstream.protocol.weights.buckets import num_tensors
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2

DISCARD = trainer_pb2.PublishReceipt(discard_communicator=True)

# A deadline is raised to this multiple of `weights.bucket_deadline_s` at most.
MOST_TIME = 8

Wait: TypeAlias = asyncio.Future[fleet_pb2.PublishReport]


class Publisher(Part):
    """Decides which servers are sent the newest version and follows each publish to its end.

    Phases: `prepare` asks the due servers and returns the trainer's order; `start` tells the
    servers to receive, unless `prepare` did so already; `finish` commits and waits until the
    servers have loaded the weights. From the commit on a task of each receiver awaits its reports,
    checks digests and probe, and notes the server's version. Any failure makes the server stale,
    and `Failures` decides what follows.
    """

    def __init__(
        self,
        fleet: Fleet,
        run: ControlledRun,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._fleet = fleet
        self._run = run
        self._progress = run.progress
        self._tasks = tasks
        self._settings = run.config.weights
        self._publishes_adapters = run.config.lora.publishes_adapters
        # Seconds that a bucket of the next publish may take.
        self._bucket_deadline_s = self._settings.bucket_deadline_s
        self.failures = Failures(fleet, run)
        self.questions = PublishQuestions(run, tasks, self.failures)
        self._membership = Membership(run.progress.run_id)
        self.totals = PublishTotals()
        self.pinned = fleet.pinned
        self._num_ids = 0
        self._current: Publish | None = None
        # The part in a publish of each server that is told to receive and has not ended.
        self._open: dict[ServerKey, Receiver] = {}
        # Whether the last publish sent only adapters. A publish without `start` uses its layout.
        self._last_was_adapters = False
        # Number of the trainer, and the servers that hold its base weights: to these the trainer
        # may send only adapters.
        self._trainer = 0
        self._holders: set[ServerKey] = set()

    def due(self, version: PolicyVersion | None = None) -> list[ServerSession]:
        """Returns the servers that should be sent `version`, by default the newest, now.

        Those of a run by storage are never sent weights: `StoredPublisher` lets them fetch.
        """
        newest = version or self._progress.version
        sessions = self._fleet.sessions
        is_by_storage = self._settings.storage_url is not None
        if is_by_storage or self._fleet.versions[newest] == len(sessions):
            return []
        due = []
        now_s = time.monotonic()
        for session in sessions.values():
            may_be_sent = now_s >= session.retry_publish_s and not self.questions.is_late(session)
            is_behind = session.version != newest and session.key not in self.pinned
            lacks = session.state in (JOINING, STALE) or (session.is_serving and is_behind)
            if may_be_sent and lacks:
                due.append(session)
        return due

    def trainer_joined(self, num_senders: int) -> None:
        """Abandons the previous trainer's publish, and forgets what servers have of that trainer.

        `num_senders` ranks of the new trainer send.
        """
        if self._current is not None:
            self._abandon(self._current, "the trainer was lost")
        self._trainer += 1
        self._holders.clear()
        self._membership.forget()
        self._membership.num_senders = num_senders

    def pin(self, session: ServerSession) -> bool:
        """Keeps a server at its version; returns False if a publish to it is already under way."""
        current = [] if self._current is None else self._current.receivers
        if any(receiver.session is session for receiver in current):
            return False
        self.pinned.add(session.key)
        return True

    def ask_ahead(self, version: PolicyVersion) -> None:
        """Asks servers if they are ready to receive `version`, before the trainer has made it."""
        self.questions.ask(self.due(version), self._question(version))

    def _question(self, version: PolicyVersion) -> fleet_pb2.PreparePublish:
        self._num_ids += 1
        return fleet_pb2.PreparePublish(
            publish_id=f"p{self._num_ids:06d}", version=version_to_pb(version)
        )

    async def prepare(self, trainer: trainer_pb2.NextRequest) -> weights_pb2.PublishOrder | None:
        """Asks the due servers if they are ready; returns the trainer's order.

        Returns None if no server is due and ready. The publish begins at once if layout and digests
        are known and no probe follows: the servers get their orders, with the digests, before the
        trainer sends. With a probe, the engines would pause while the trainer computes it.
        """
        if self._current is not None:
            # The trainer asks for an order, so it never got the last one.
            self._abandon(self._current, "the trainer does not send")
        version = self._progress.version
        targets = self.failures.together(self.due())
        if not targets:
            return None
        question = self._question(version)
        ready = self._drop(await self.questions.answers(targets, question))
        transport, misfits = choose_for(self._run, {s.name: s.hello.place for s in ready})
        fitting = self._drop(dict(zip(ready, misfits, strict=True)))
        # A server that began to drain meanwhile takes no part.
        ready = [session for session in fitting if not session.is_leaving]
        if not ready:
            return None
        order = self._membership.order_for(ready, transport, trainer_has=trainer.communicator_id)
        holds_base = self._publishes_adapters and all(s.key in self._holders for s in ready)
        is_fresh = any(not session.is_serving for session in ready)
        is_anew = self._publishes_adapters and not holds_base
        is_nth = self.totals.publishes % self._settings.verify_every == 0
        order.publish_id = question.publish_id
        order.version.CopyFrom(question.version)
        order.verify = is_fresh or is_anew or is_nth
        order.adapters_alone = holds_base
        order.bucket_deadline_s = self._bucket_deadline_s
        order.join_deadline_s = self._settings.join_deadline_s
        has_version = version_from_pb(trainer.version) == version
        is_known = has_version and order.adapters_alone == self._last_was_adapters
        may_begin = not (order.new_communicator or order.verify)
        order.begun = bool(trainer.bucket_digests) and is_known and may_begin
        digests = tuple(trainer.bucket_digests) if order.begun else ()
        publish = Publish(order, ready, self._trainer, digests)
        self._current = publish
        if order.begun:
            self.tell(publish, None)
        self._await_end(publish, len(digests))
        return order

    def _drop(self, problems: Mapping[ServerSession, str]) -> list[ServerSession]:
        """Makes servers with a problem stale; returns all others that are still connected.

        A serving server that is pinned is neither made stale nor returned: it was pinned after it
        was asked.
        """
        connected = []
        for session, problem in problems.items():
            if session.is_serving and session.key in self.pinned:
                continue
            if problem:
                self.failures.make_stale(session, problem)
            elif self._fleet.find(session.key) is session:
                connected.append(session)
        return connected

    def _await_end(self, publish: Publish, num_buckets: int) -> None:
        """Sets the deadline of this publish; the run fails if the trainer misses it."""
        order = publish.order
        stall_s = self._run.config.controller.stall_timeout_s
        limit_s = 2 * order.join_deadline_s + num_buckets * order.bucket_deadline_s
        publish.limit_s = limit_s + stall_s
        publish.until_s = self._run.clock.now_s() + publish.limit_s

    def overdue(self) -> str:
        """Returns which publish the trainer did not end in time, as a cause, or ""."""
        publish = self._current
        if publish is None or self._run.clock.now_s() <= publish.until_s:
            return ""
        return (
            f"the trainer did not end publish {publish.publish_id} within {publish.limit_s:.0f} s"
        )

    def start(self, start: trainer_pb2.PublishStart) -> list[weights_pb2.Receiver]:
        """Orders all receivers to receive, and returns them; returns [] if a receiver was lost.

        With `start.is_question` nothing is started, and only the receivers that are still there and
        have not failed are returned.
        """
        publish = self._current
        if publish is None or publish.publish_id != start.publish_id:
            return []
        there = {
            receiver.session.name
            for receiver in publish.receivers
            if not receiver.cause and self._fleet.find(receiver.session.key) is receiver.session
        }
        receivers = [
            receiver for receiver in publish.order.receivers if receiver.server_id in there
        ]
        if start.is_question:
            return receivers
        if len(receivers) < len(publish.receivers):
            self._abandon(publish, "a receiver was lost")
            return []
        # If the call is repeated: a server that gets the order twice would join twice.
        if publish.told_s is None:
            publish.order.communicator.CopyFrom(start.communicator)
            self.tell(publish, start.layout)
            self._await_end(publish, num_tensors(start.layout))
        return receivers

    async def finish(self, result: trainer_pb2.PublishResult) -> trainer_pb2.PublishReceipt:
        """Handles the trainer's result: commits servers with the right digests, aborts all others.

        Returns when all receivers have loaded, or after `bucket_deadline_s`. Slower receivers are
        followed to their end while the trainer trains.
        """
        publish = self._current
        if publish is None or publish.publish_id != result.publish_id:
            # The call was repeated: the trainer must leave the communicator.
            self._membership.forget()
            return DISCARD
        self._current = None
        cause = ""
        digests = tuple(result.bucket_digests)
        if result.error:
            cause = f"the learner could not send: {result.error}"
        elif publish.digests not in ((), digests):
            cause = "the learner sent something else than it had said"
        elif publish.told_s is None or all(receiver.cause for receiver in publish.receivers):
            # At the end of a run nothing can be followed any more.
            cause = "no receiver is there any more"
        if cause:
            self._abandon(publish, cause)
            return DISCARD
        if not publish.digests:
            publish.digests = digests
            publish.probe = result.probe
            self._commit(publish, num_coming=1)
        try:
            loads = [receiver.loaded for receiver in publish.receivers]
            await self._run.clock.wait(loads, self._settings.bucket_deadline_s)
        except asyncio.CancelledError:
            # The trainer is gone: without this the servers would stay in LOADING forever.
            self._abandon(publish, "the trainer was lost")
            raise
        self.totals.sent(result)
        # A receiver that has neither loaded nor failed is late.
        settled = [receiver for receiver in publish.receivers if receiver.loaded.done()]
        loaded = [receiver for receiver in settled if not receiver.problem()]
        for receiver in publish.receivers:
            if loaded and not receiver.loaded.done():
                self._run.events.warn(
                    f"rollout server {receiver.session.name} still loads version "
                    f"{publish.version.step}: the others and the trainer go on"
                )
        is_broken = len(loaded) < len(settled)
        if is_broken:
            self._membership.forget(publish.order.communicator.communicator_id)
        return trainer_pb2.PublishReceipt(discard_communicator=is_broken)

    def _abandon(self, publish: Publish, cause: str) -> None:
        """Fails all receivers that were told and have not ended: those that serve keep on."""
        if self._current is publish:
            # Not always the current one: while a publish is finished, the next may have begun.
            self._current = None
        self._membership.forget(publish.order.communicator.communicator_id)
        for receiver in publish.receivers:
            if self._open.get(receiver.session.key) is receiver:
                self._fail(receiver, cause)

    def tell(self, publish: Publish, layout: weights_pb2.WeightLayout | None) -> None:
        """Orders all receivers to receive, and also to commit if the digests are already known.

        With `layout` None the previous weight layout still applies.
        """
        self._last_was_adapters = publish.order.adapters_alone
        ranks = {r.server_id: r.first_rank for r in publish.order.receivers}
        # A server needs to know only its own rank.
        order = weights_pb2.PublishOrder()
        order.CopyFrom(publish.order)
        order.ClearField("receivers")
        common = fleet_pb2.ReceiveWeights(order=order, layout=layout)
        shared = fleet_pb2.ControllerMessage(receive=common).SerializeToString()
        publish.told_s = time.monotonic()
        for receiver in publish.receivers:
            session = receiver.session
            self._open[session.key] = receiver
            if not order.adapters_alone:
                self._holders.discard(session.key)
            session.become(LOADING)
            own_part = fleet_pb2.ReceiveWeights(first_rank=ranks.get(session.key.server_id, 0))
            session.send(JoinedOrder(fleet_pb2.ControllerMessage(receive=own_part), shared))
        if publish.digests:
            self._commit(publish, num_coming=len(publish.digests))

    def _commit(self, publish: Publish, *, num_coming: int) -> None:
        """Orders the receivers to resume once they have loaded the buckets of the publish.

        If the order says `verify`, they also score its probe. A receiver fails if it does not serve
        in time; the limit allows for the deadlines of `num_coming` buckets, loading and resuming.
        """
        commit = fleet_pb2.CommitPublish(
            publish_id=publish.publish_id,
            version=publish.order.version,
            probe=publish.probe if publish.order.verify else None,
            bucket_digests=publish.digests,
        )
        shared = fleet_pb2.ControllerMessage(commit=commit).SerializeToString()
        own_order = fleet_pb2.ControllerMessage(commit=fleet_pb2.CommitPublish())
        order = JoinedOrder(own_order, shared)
        for receiver in publish.receivers:
            if not receiver.cause:
                receiver.session.send(order)
                self._tasks.create_task(self._lead(receiver))
        bucket_s = publish.order.bucket_deadline_s
        join_s = publish.order.join_deadline_s
        self._tasks.create_task(self._expire(publish, 2 * join_s + num_coming * bucket_s))

    async def _expire(self, publish: Publish, limit_s: float) -> None:
        """Fails each receiver that does not serve after `limit_s`; one timer covers all."""
        await self._run.clock.wait([r.serving for r in publish.receivers], limit_s)
        for receiver in publish.receivers:
            if not receiver.serving.done():
                self._fail(receiver, f"no answer within {limit_s:g} s")

    async def _lead(self, receiver: Receiver) -> None:
        """Leads a receiver from its commit to its end: loaded, serving, proved."""
        publish = receiver.publish
        session = receiver.session
        await receiver.loaded
        if problem := receiver.problem():
            self._fail(receiver, problem)
        report = await receiver.serving
        if receiver.cause:
            return
        del self._open[session.key]
        now_s = time.monotonic()
        told_s = publish.told_s
        assert told_s is not None
        self.totals.served(
            report, told_s=now_s - told_s, unserved_s=now_s - session.unserved_since_s
        )
        if publish.order.verify:
            assert publish.probe is not None
            problem = check_probe(publish.probe, report, self.totals)
            verdict = fleet_pb2.ProbeVerdict(
                publish_id=publish.publish_id, passed=not problem, message=problem
            )
            session.send(fleet_pb2.ControllerMessage(probe_verdict=verdict))
        if problem:
            self._membership.forget(publish.order.communicator.communicator_id)
            # The matrices may be wrong as well as the adapters.
            self._holders.discard(session.key)
            self.failures.make_stale(session, problem)
        else:
            if publish.trainer == self._trainer and not publish.order.adapters_alone:
                self._holders.add(session.key)
            self.failures.served(session)
            session.version = publish.version
            session.publish_id = publish.publish_id
            if not session.is_leaving:
                session.cause = ""
            session.become(SERVING)
        self._run.signal.notify()

    def publish_reported(self, session: ServerSession, report: fleet_pb2.PublishReport) -> None:
        self.questions.report(session, report)
        receiver = self._open.get(session.key)
        is_served = session.is_serving and report.publish_id == session.publish_id
        if receiver is None or report.publish_id != receiver.publish.publish_id:
            if is_served and report.phase == FAILED:
                # The server has itself stopped serving these weights.
                self.failures.make_stale(session, report.message)
            return
        if report.phase == FAILED:
            self._fail(receiver, report.message or "it failed")
            return
        loaded = fleet_pb2.PUBLISH_PHASE_LOADED
        serving = fleet_pb2.PUBLISH_PHASE_SERVING
        # A server that serves has loaded.
        reached = {loaded: [receiver.loaded], serving: [receiver.loaded, receiver.serving]}
        for wait in reached.get(report.phase, []):
            if not wait.done():
                wait.set_result(report)

    def _fail(self, receiver: Receiver, cause: str) -> None:
        """Ends a receiver as failed; only the first call for a receiver has an effect."""
        if receiver.cause:
            return
        publish = receiver.publish
        session = receiver.session
        receiver.cause = cause
        self._open.pop(session.key, None)
        if self._fleet.find(session.key) is session:
            # Once for each failed publish: this machine or network may be slow.
            setting_s = self._settings.bucket_deadline_s
            deadline_s = publish.order.bucket_deadline_s
            if deadline_s == self._bucket_deadline_s < MOST_TIME * setting_s:
                self._bucket_deadline_s = 2 * deadline_s
                self._run.events.warn(
                    f"a publish failed: each bucket may take {self._bucket_deadline_s:g} s from "
                    f"now on (weights.bucket_deadline_s = {setting_s:g})"
                )
        self._membership.forget(publish.order.communicator.communicator_id)
        abort = fleet_pb2.AbortPublish(publish_id=publish.publish_id, reason=cause)
        session.send(fleet_pb2.ControllerMessage(abort=abort))
        self.failures.make_stale(session, cause)
        for wait in (receiver.loaded, receiver.serving):
            if not wait.done():
                wait.set_result(fleet_pb2.PublishReport(phase=FAILED, message=cause))

    def lost(self, session: ServerSession) -> None:
        self.pinned.discard(session.key)
        self.questions.server_lost(session)
        if session.key in self._membership.members:
            self._membership.forget()
        self._holders.discard(session.key)
        if (receiver := self._open.get(session.key)) is not None:
            self._fail(receiver, "the server is gone")


@dataclass(eq=False)
class Receiver:
    """One server in one publish, and its two reports; a failure completes both."""

    publish: Publish
    session: ServerSession
    loaded: Wait = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    serving: Wait = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    # Why the server failed; "" if it has not.
    cause: str = ""

    def problem(self) -> str:
        """Returns why a server that has reported does not hold the buckets, or "" if it does."""
        if self.cause or tuple(self.loaded.result().bucket_digests) == self.publish.digests:
            return self.cause
        return "the digests of the loaded buckets are not those that were sent"


@dataclass(eq=False)
class Publish:
    """The delivery of one version to some servers."""

    order: weights_pb2.PublishOrder
    sessions: InitVar[Sequence[ServerSession]]
    # Number of the trainer that sends.
    trainer: int = 0
    # Digests of the buckets, and the probe if the order says `verify`: empty until they are known.
    digests: tuple[bytes, ...] = ()
    probe: weights_pb2.Probe | None = None
    # The time at which the receivers were told to receive, by `time.monotonic`.
    told_s: float | None = None
    # The seconds that the trainer may take from its last order on, and the end of these by the
    # run's clock.
    limit_s: float = 0.0
    until_s: float = 0.0

    def __post_init__(self, sessions: Sequence[ServerSession]) -> None:
        self.receivers = [Receiver(self, session) for session in sessions]

    @property
    def publish_id(self) -> str:
        return self.order.publish_id

    @property
    def version(self) -> PolicyVersion:
        return version_from_pb(self.order.version)
