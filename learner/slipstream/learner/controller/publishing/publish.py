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

import asyncio
import time
from collections.abc import Mapping

from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.part import Part
from slipstream.learner.controller.publishing.delivery import Deliveries, Publish
from slipstream.learner.controller.publishing.receivers import choose_for
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import JOINING, STALE, ServerSession
from slipstream.protocol.codec import version_from_pb, version_to_pb
from slipstream.protocol.weights.buckets import num_tensors
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2

DISCARD = trainer_pb2.PublishReceipt(discard_communicator=True)


class Publisher(Part):
    """Decides which servers are sent the newest version and follows each publish to its end.

    Phases: `prepare` asks the due servers and returns the trainer's order; `start` tells the
    servers to receive, unless `prepare` did so already; `finish` commits and waits until the
    servers have loaded the weights.
    """

    def __init__(self, fleet: Fleet, run: Run, tasks: asyncio.TaskGroup) -> None:
        self._fleet, self._run, self._progress = fleet, run, run.progress
        self._settings = run.config.weights
        self._publishes_adapters = run.config.lora.publishes_adapters
        self.deliveries = Deliveries(fleet, run, tasks)
        self._num_ids = 0
        self._current: Publish | None = None
        # Whether the last publish sent only adapters. A publish without `start` uses its layout.
        self._last_was_adapters = False
        self.pinned = fleet.pinned
        self.totals = self.deliveries.totals

    def due(self, version: PolicyVersion | None = None) -> list[ServerSession]:
        """Returns the servers that should be sent `version`, by default the newest, now.

        Those of a run by storage are never sent weights: `StoredPublisher` lets them fetch.
        """
        newest, sessions = version or self._progress.version, self._fleet.sessions
        is_by_storage = self._settings.storage_url is not None
        if is_by_storage or self._fleet.versions[newest] == len(sessions):
            return []
        return [each for each in sessions.values() if self._is_due(each, newest)]

    def _is_due(self, session: ServerSession, version: PolicyVersion) -> bool:
        is_late = self.deliveries.questions.is_late(session)
        if time.monotonic() < session.retry_publish_s or is_late:
            return False
        if session.state in (JOINING, STALE):
            return True
        is_pinned = session.key in self.pinned
        return session.is_serving and not is_pinned and session.version != version

    def trainer_joined(self, num_senders: int) -> None:
        """Abandons the previous trainer's publish; `num_senders` ranks of the new trainer send."""
        self.trainer_lost()
        self.deliveries.membership.num_senders = num_senders

    def trainer_lost(self) -> None:
        """Abandons the current publish, since its trainer is lost."""
        if self._current is not None:
            self._abandon(self._current, "the trainer was lost")
        self.deliveries.trainer_lost()

    def pin(self, session: ServerSession) -> bool:
        """Keeps a server at its version; returns False if a publish to it is already under way."""
        current = [] if self._current is None else self._current.receivers
        if any(receiver.session is session for receiver in current):
            return False
        self.pinned.add(session.key)
        return True

    def ask_ahead(self, version: PolicyVersion) -> None:
        """Asks servers if they are ready to receive `version`, before the trainer has made it."""
        self.deliveries.questions.ask(self.due(version), self._question(version))

    def _question(self, version: PolicyVersion) -> fleet_pb2.PreparePublish:
        self._num_ids += 1
        return fleet_pb2.PreparePublish(
            publish_id=f"p{self._num_ids:06d}", version=version_to_pb(version)
        )

    async def prepare(
        self, trainer: trainer_pb2.NextRequest | None = None
    ) -> weights_pb2.PublishOrder | None:
        """Asks the due servers if they are ready; returns the trainer's order.

        Returns None if no server is due and ready. The publish begins at once if layout and digests
        are known and no probe follows: the servers get their orders, with the digests, before the
        trainer sends. With a probe, the engines would pause while the trainer computes it.
        """
        if self._current is not None:
            # The trainer asks for an order, so it never got the last one.
            self._abandon(self._current, "the trainer does not send")
        trainer = trainer or trainer_pb2.NextRequest()
        deliveries, version = self.deliveries, self._progress.version
        targets = deliveries.failures.together(self.due())
        if not targets:
            return None
        question = self._question(version)
        ready, transport = self._fitting(await deliveries.questions.answers(targets, question))
        if not ready:
            return None
        order = deliveries.membership.order_for(
            ready, transport, trainer_has=trainer.communicator_id
        )
        holds_base = self._publishes_adapters and all(s.key in deliveries.holders for s in ready)
        is_fresh = any(not session.is_serving for session in ready)
        is_anew = self._publishes_adapters and not holds_base
        is_nth = self.totals.publishes % self._settings.verify_every == 0
        order.publish_id = question.publish_id
        order.version.CopyFrom(question.version)
        order.verify, order.adapters_alone = is_fresh or is_anew or is_nth, holds_base
        order.bucket_deadline_s = deliveries.bucket_deadline_s
        order.join_deadline_s = self._settings.join_deadline_s
        has_version = version_from_pb(trainer.version) == version
        is_known = has_version and order.adapters_alone == self._last_was_adapters
        may_begin = not (order.new_communicator or order.verify)
        order.begun = bool(trainer.bucket_digests) and is_known and may_begin
        digests = trainer.bucket_digests if order.begun else ()
        publish = Publish(order, ready, trainer=deliveries.trainer, digests=digests)
        self._current = publish
        if order.begun:
            self._tell(publish, None)
        self._await_end(publish, len(digests))
        return order

    def _fitting(self, answers: Mapping[ServerSession, str]) -> tuple[list[ServerSession], str]:
        """Returns the servers that can receive together, and their transport."""
        ready = self._drop(answers)
        transport, misfits = choose_for(self._run, {s.name: s.hello.place for s in ready})
        fitting = self._drop(dict(zip(ready, misfits, strict=True)))
        # A server that began to drain meanwhile takes no part.
        return [session for session in fitting if not session.is_leaving], transport

    def _drop(self, problems: Mapping[ServerSession, str]) -> list[ServerSession]:
        """Makes servers with a problem stale; returns all others that are still connected.

        A serving server that is pinned is neither made stale nor returned: it was pinned after it
        was asked.
        """
        kept = []
        for session, problem in problems.items():
            if session.is_serving and session.key in self.pinned:
                continue
            if problem:
                self.deliveries.failures.make_stale(session, problem)
            elif self._fleet.find(session.key) is session:
                kept.append(session)
        return kept

    def _tell(self, publish: Publish, layout: weights_pb2.WeightLayout | None) -> None:
        self._last_was_adapters = publish.order.adapters_alone
        self.deliveries.tell(publish, layout)

    def _await_end(self, publish: Publish, num_buckets: int) -> None:
        """Sets the deadline of this publish; the run fails if the trainer misses it."""
        order, stall_s = publish.order, self._run.config.controller.stall_timeout_s
        limit_s = 2 * order.join_deadline_s + num_buckets * order.bucket_deadline_s
        self._progress.publish_ordered(publish.publish_id, limit_s + stall_s)

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
        receivers = [each for each in publish.order.receivers if each.server_id in there]
        if start.is_question:
            return receivers
        if len(receivers) < len(publish.receivers):
            self._abandon(publish, "a receiver was lost")
            return []
        # If the call is repeated: a server that gets the order twice would join twice.
        if publish.told_s is None:
            publish.order.communicator.CopyFrom(start.communicator)
            self._tell(publish, start.layout)
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
            self.deliveries.membership.forget()
            return DISCARD
        self._current = None
        self._progress.publish_ended()
        cause, digests = "", list(result.bucket_digests)
        if result.error:
            cause = f"the learner could not send: {result.error}"
        elif publish.digests not in ((), tuple(digests)):
            cause = "the learner sent something else than it had said"
        elif publish.told_s is None or all(receiver.cause for receiver in publish.receivers):
            # At the end of a run nothing can be followed any more.
            cause = "no receiver is there any more"
        if cause:
            self._abandon(publish, cause)
            return DISCARD
        if not publish.digests:
            self.deliveries.commit(publish, digests, result.probe, num_coming=1)
        try:
            loads = [receiver.loaded for receiver in publish.receivers]
            await self._run.clock.wait(loads, self._settings.bucket_deadline_s)
        except asyncio.CancelledError:
            # The trainer is gone: without this the servers would stay in LOADING forever.
            self._abandon(publish, "the trainer was lost")
            raise
        receipt = self._receipt(publish, digests)
        self.totals.sent(result)
        return receipt

    def _receipt(self, publish: Publish, digests: list[bytes]) -> trainer_pb2.PublishReceipt:
        """Returns the receipt; a receiver that has neither loaded nor failed is late."""
        settled = [receiver for receiver in publish.receivers if receiver.loaded.done()]
        loaded = [receiver for receiver in settled if not receiver.problem(digests)]
        for receiver in publish.receivers:
            if loaded and not receiver.loaded.done():
                self._run.events.warn(
                    f"rollout server {receiver.session.name} still loads version "
                    f"{publish.version.step}: the others and the trainer go on"
                )
        is_broken = len(loaded) < len(settled)
        if is_broken:
            self.deliveries.membership.forget(publish.order.communicator.communicator_id)
        return trainer_pb2.PublishReceipt(discard_communicator=is_broken)

    def _abandon(self, publish: Publish, cause: str) -> None:
        if self._current is publish:
            # Not always the current one: while a publish is finished, the next may have begun.
            self._current = None
            self._progress.publish_ended()
        self.deliveries.abandon(publish, cause)

    def report(self, session: ServerSession, report: fleet_pb2.PublishReport) -> None:
        """Passes a server's report to the part that waits for it."""
        self.deliveries.report(session, report)

    def lost(self, session: ServerSession) -> None:
        """Ends all waits for a server that was lost."""
        self.pinned.discard(session.key)
        self.deliveries.server_lost(session)
