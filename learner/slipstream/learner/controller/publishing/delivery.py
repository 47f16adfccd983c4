"""The delivery of one version to each of its receivers, from the order to receive to its end.

Consumes: a server's reports. Produces: orders to receive, commits, verdicts on probes, aborts.
Waits for: the end of each receiver, with a deadline. Unblocked by: its report, its loss, or a
failure of the publish.

The totals of all publishes, and the check of a probe, stand at the beginning.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from slipstream.core.errors import ProtocolError
from slipstream.core.types import LogprobArray
from slipstream.learner.controller.publishing.receivers import FAILED, Failures, Questions
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import (
    JoinedOrder,
    ServerEvent,
    ServerKey,
    ServerSession,
)
from slipstream.protocol.codec import unpack_logprobs, version_from_pb
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2

# Least 1 - p in the division: below it, rounding of log-probabilities near 0 would dominate.
_LEAST_DOUBT = 0.01

_SECONDS = ("prepare_s", "pause_s", "receive_s", "load_s", "resume_s", "wire_s", "steps_s")


def logit_gap(expected: LogprobArray, got: LogprobArray) -> float:
    """Returns the typical logit error, in nats, that explains how `got` differs from `expected`.

    Both are log-probabilities of the same tokens. A logit that is off by x moves the
    log-probability of its token by (1 - p) x. The division by 1 - p gives the same error for likely
    and unlikely tokens. The result is the power mean with exponent 1/2, so that a few large errors
    do not dominate. It is NaN if a value is not finite.
    """
    wanted, given = expected.astype(np.float64), got.astype(np.float64)
    doubt = np.maximum(1.0 - np.exp(np.minimum(wanted, 0.0)), _LEAST_DOUBT)
    with np.errstate(invalid="ignore"):
        errors = np.abs(wanted - given) / doubt
    # An infinite difference measures nothing.
    errors[~np.isfinite(errors)] = np.nan
    return float(np.sqrt(errors).mean() ** 2)


def check_probe(
    probe: weights_pb2.Probe, report: fleet_pb2.PublishReport, totals: PublishTotals
) -> str:
    """Returns why the probe fails, or "" if it passes; adds its logit gap to `totals`.

    A failed probe means that the server does not compute with the weights that it was sent.
    """
    try:
        expected = unpack_logprobs(probe.expected_logprobs)
        got = unpack_logprobs(report.probe_logprobs)
    except ProtocolError as error:
        return f"the probe: {error}"
    if len(expected) == 0 or len(expected) != len(got):
        return f"the probe asked for {len(expected)} log-probabilities and got {len(got)}"
    gap = logit_gap(expected, got)
    totals.verified += 1
    totals.probe_gap_max = max(totals.probe_gap_max, gap)
    if not gap <= probe.tolerance:
        return (
            "the probe's log-probabilities differ from the learner's like logits that are off "
            f"by {gap:.2e}, more than {probe.tolerance:.2e}"
        )
    return ""


@dataclass
class PublishTotals:
    """Counts, bytes and seconds of all publishes since the controller started."""

    publishes: int = 0
    verified: int = 0
    paused_s: float = 0.0
    bytes_sent: int = 0
    last_paused_s: float = 0.0
    # The trainer's result of the newest publish that it sent completely.
    last_sent: trainer_pb2.PublishResult = field(default_factory=trainer_pb2.PublishResult)
    probe_gap_max: float = 0.0
    last_stages: fleet_pb2.PublishStages = field(default_factory=fleet_pb2.PublishStages)

    # Versions in storage, their bytes, and their bytes without deltas; fetches and their bytes.
    num_stored: int = 0
    stored_bytes: int = 0
    stored_whole_bytes: int = 0
    num_fetched: int = 0
    fetched_bytes: int = 0
    last_stored: trainer_pb2.StoredReport = field(default_factory=trainer_pb2.StoredReport)
    last_fetch_s: float = 0.0

    def stored(self, report: trainer_pb2.StoredReport) -> None:
        """Counts a version that was written to storage."""
        self.num_stored += 1
        self.stored_bytes += report.num_bytes
        self.stored_whole_bytes += report.whole_bytes
        self.last_stored = report

    def fetched(self, report: fleet_pb2.PublishReport) -> None:
        """Notes that a server has fetched a version."""
        self.num_fetched += 1
        self.fetched_bytes += report.stages.fetched_bytes
        self.last_fetch_s = report.stages.fetch_s

    def sent(self, result: trainer_pb2.PublishResult) -> None:
        """Notes that the trainer has sent a version completely."""
        self.publishes += 1
        self.bytes_sent += result.bytes_sent
        self.last_sent = result

    def served(self, report: fleet_pb2.PublishReport, *, told_s: float, unserved_s: float) -> None:
        """Notes that a server serves new weights, and adds the times in its report.

        No reported time may exceed the time that the controller measured. `told_s` is the number of
        seconds since the server was told to receive, and `unserved_s` since it last served or
        joined: a pause may begin before its publish.
        """
        self.last_paused_s = min(report.paused_s, unserved_s)
        self.paused_s += self.last_paused_s
        self.last_stages = stages = fleet_pb2.PublishStages()
        stages.CopyFrom(report.stages)
        for name in _SECONDS:
            setattr(stages, name, min(getattr(stages, name), told_s))

    def gauges(self) -> dict[str, float]:
        """Returns the costs of the newest publish, on the trainer and on the last server.

        The last server is the server that loaded its weights last.
        """
        stages, sent = self.last_stages, self.last_sent
        return {
            "pause_s": self.last_paused_s,
            "publish_prepare_s": stages.prepare_s,
            "publish_stop_s": stages.pause_s,
            "publish_receive_s": stages.receive_s,
            "publish_load_s": stages.load_s,
            "publish_resume_s": stages.resume_s,
            "publish_steps_s": stages.steps_s,
            "publish_copied": float(stages.copied),
            "publish_staged": float(stages.staged),
            "weights_send_s": sent.send_s,
            "weights_gather_s": sent.export_s,
            "weights_bytes": float(sent.bytes_sent),
            # Each side's time includes waits for the other side, so the shorter time is the wire's.
            "weights_wire_s": min(sent.wire_s, stages.wire_s or sent.wire_s),
            "weights_wire_bytes": float(sent.wire_bytes),
            "stored_version_bytes": float(self.last_stored.num_bytes),
            "store_s": self.last_stored.write_s,
            "fetch_s": self.last_fetch_s,
        }

    def summary(self) -> dict[str, float]:
        """Returns the totals, by their names in the run's summary."""
        return {
            "publishes": self.publishes,
            "publishes_verified": self.verified,
            "probe_gap_max": self.probe_gap_max,
            "pause_s": self.paused_s,
            "published_bytes": self.bytes_sent,
            "versions_stored": self.num_stored,
            "stored_bytes": self.stored_bytes,
            "stored_whole_bytes": self.stored_whole_bytes,
            "versions_fetched": self.num_fetched,
            "fetched_bytes": self.fetched_bytes,
        }


LOADED = fleet_pb2.PUBLISH_PHASE_LOADED
SERVING = fleet_pb2.PUBLISH_PHASE_SERVING

# A deadline is raised to this multiple of `weights.bucket_deadline_s` at most.
MOST_TIME = 8

Wait: TypeAlias = asyncio.Future[fleet_pb2.PublishReport]


class Membership:
    """The members of the newest communicator; a change of members or a fault replaces it."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        # Number of the trainer's ranks that send; they are the first ranks of a communicator.
        self.num_senders = 1
        self._members: tuple[ServerKey, ...] = ()
        self._epoch, self._name = 0, ""

    def forget(self, communicator_id: str | None = None) -> None:
        """Drops the newest communicator; with an id, only if the communicator has this id."""
        if communicator_id in (None, self._name):
            self._members = ()

    def server_lost(self, key: ServerKey) -> None:
        """Drops the communicator if this server was a member."""
        if key in self._members:
            self.forget()

    def order_for(
        self, targets: Sequence[ServerSession], transport: str, *, trainer_has: str
    ) -> weights_pb2.PublishOrder:
        """Returns an order to publish to `targets`, with their first ranks in the communicator.

        The newest communicator is used again if its members are the same and the trainer still has
        it: `trainer_has` is the trainer's communicator id. Otherwise the order names a new
        communicator.
        """
        members = tuple(session.key for session in targets)
        new = members != self._members or trainer_has != self._name
        if new:
            self._members = members
            self._epoch += 1
            # A secret that is sent only over gRPC: strangers cannot join by gloo or ipc.
            self._name = f"{self._run_id}-{self._epoch}-{secrets.token_hex(16)}"
        receivers, rank = [], self.num_senders
        for session in targets:
            workers = session.hello.engine_workers
            receivers.append(
                weights_pb2.Receiver(server_id=session.name, first_rank=rank, num_workers=workers)
            )
            rank += workers
        return weights_pb2.PublishOrder(
            communicator=weights_pb2.Communicator(
                communicator_id=self._name,
                transport=transport,
                world_size=rank,
                num_senders=self.num_senders,
            ),
            new_communicator=new,
            receivers=receivers,
        )


@dataclass(eq=False)
class Receiver:
    """One server in one publish, and its two reports; a failure completes both."""

    session: ServerSession
    loaded: Wait = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    serving: Wait = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    # Why the server failed; "" if it has not.
    cause: str = ""

    def problem(self, digests: Sequence[bytes]) -> str:
        """Returns why a server that has reported does not hold these buckets, or "" if it does."""
        if self.cause or list(self.loaded.result().bucket_digests) == list(digests):
            return self.cause
        return "the digests of the loaded buckets are not those that were sent"


class Publish:
    """The delivery of one version to some servers.

    `trainer` is the number of the trainer that sends. `digests` are those of the buckets if the
    trainer sent them beforehand, otherwise empty.
    """

    def __init__(
        self,
        order: weights_pb2.PublishOrder,
        sessions: Sequence[ServerSession],
        *,
        trainer: int = 0,
        digests: Sequence[bytes] = (),
    ) -> None:
        self.order, self.publish_id = order, order.publish_id
        self.version = version_from_pb(order.version)
        self.receivers = [Receiver(session) for session in sessions]
        self.trainer, self.digests = trainer, tuple(digests)
        # The time at which the receivers were told to receive, by `time.monotonic`.
        self.told_s: float | None = None


class Deliveries:
    """Leads every receiver of every publish to its end: told, loaded, committed, serving, proved.

    `tell` orders the receivers to receive, and `commit` to resume. A task of each receiver awaits
    its reports, checks digests and probe, and notes the server's version. Any failure makes the
    server stale, and `Failures` decides what follows.
    """

    def __init__(self, fleet: Fleet, run: Run, tasks: asyncio.TaskGroup) -> None:
        self._fleet, self._run, self._tasks = fleet, run, tasks
        self._settings = run.config.weights
        # Seconds that a bucket of the next publish may take.
        self.bucket_deadline_s = self._settings.bucket_deadline_s
        self.failures = Failures(fleet, run)
        self.questions = Questions(run, tasks, self.failures)
        self.membership = Membership(run.progress.run_id)
        self.totals = PublishTotals()
        # The publish of each server that is told to receive and has not ended.
        self._open: dict[ServerKey, tuple[Publish, Receiver]] = {}
        # Number of the trainer, and the servers that hold its base weights: to these the trainer
        # may send only adapters.
        self.trainer = 0
        self.holders: set[ServerKey] = set()

    def trainer_lost(self) -> None:
        """Forgets what the servers have of a trainer that is lost."""
        self.trainer += 1
        self.holders.clear()
        self.membership.forget()

    def tell(self, publish: Publish, layout: weights_pb2.WeightLayout | None) -> None:
        """Orders all receivers to receive, and also to commit if the digests are already known.

        With `layout` None the previous weight layout still applies.
        """
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
            self._open[session.key] = publish, receiver
            if not order.adapters_alone:
                self.holders.discard(session.key)
            session.on(ServerEvent.RECEIVE)
            own = fleet_pb2.ReceiveWeights(first_rank=ranks.get(session.key.server_id, 0))
            session.send(JoinedOrder(fleet_pb2.ControllerMessage(receive=own), shared))
        if publish.digests:
            self.commit(publish, publish.digests, None, num_coming=len(publish.digests))

    def commit(
        self,
        publish: Publish,
        digests: Sequence[bytes],
        probe: weights_pb2.Probe | None,
        *,
        num_coming: int,
    ) -> None:
        """Orders the receivers to resume once they have loaded the buckets with these digests.

        If the order says `verify`, they also score `probe`. A receiver fails if it does not serve
        in time; the limit allows for the deadlines of `num_coming` buckets, loading and resuming.
        """
        commit = fleet_pb2.CommitPublish(
            publish_id=publish.publish_id,
            version=publish.order.version,
            probe=probe if publish.order.verify else None,
            bucket_digests=digests,
        )
        shared = fleet_pb2.ControllerMessage(commit=commit).SerializeToString()
        own = fleet_pb2.ControllerMessage(commit=fleet_pb2.CommitPublish())
        order = JoinedOrder(own, shared)
        for receiver in publish.receivers:
            if not receiver.cause:
                receiver.session.send(order)
                self._tasks.create_task(self._lead(publish, receiver, digests, probe))
        bucket_s, join_s = publish.order.bucket_deadline_s, publish.order.join_deadline_s
        self._tasks.create_task(self._expire(publish, 2 * join_s + num_coming * bucket_s))

    async def _expire(self, publish: Publish, limit_s: float) -> None:
        """Fails each receiver that does not serve after `limit_s`; one timer covers all."""
        await self._run.clock.wait([r.serving for r in publish.receivers], limit_s)
        for receiver in publish.receivers:
            if not receiver.serving.done():
                self.fail(publish, receiver, f"no answer within {limit_s:g} s")

    async def _lead(
        self,
        publish: Publish,
        receiver: Receiver,
        digests: Sequence[bytes],
        probe: weights_pb2.Probe | None,
    ) -> None:
        """Leads a receiver from its commit to its end: loaded, serving, proved."""
        session = receiver.session
        await receiver.loaded
        if problem := receiver.problem(digests):
            self.fail(publish, receiver, problem)
        report = await receiver.serving
        if receiver.cause:
            return
        del self._open[session.key]
        now_s, told_s = time.monotonic(), publish.told_s
        assert told_s is not None
        self.totals.served(
            report, told_s=now_s - told_s, unserved_s=now_s - session.unserved_since_s
        )
        if publish.order.verify:
            assert probe is not None
            problem = check_probe(probe, report, self.totals)
            verdict = fleet_pb2.ProbeVerdict(
                publish_id=publish.publish_id, passed=not problem, message=problem
            )
            session.send(fleet_pb2.ControllerMessage(probe_verdict=verdict))
        if problem:
            self.membership.forget(publish.order.communicator.communicator_id)
            # The matrices may be wrong as well as the adapters.
            self.holders.discard(session.key)
            self.failures.make_stale(session, problem)
        else:
            self._serves(publish, session)
        self._run.signal.notify()

    def _serves(self, publish: Publish, session: ServerSession) -> None:
        if publish.trainer == self.trainer and not publish.order.adapters_alone:
            self.holders.add(session.key)
        self.failures.served(session)
        session.version, session.publish_id = publish.version, publish.publish_id
        if not session.is_leaving:
            session.cause = ""
        session.on(ServerEvent.PUBLISHED)

    def report(self, session: ServerSession, report: fleet_pb2.PublishReport) -> None:
        """Takes a server's answer or its report on a phase; a server that serves has loaded."""
        self.questions.report(session, report)
        publish, receiver = self._open.get(session.key, (None, None))
        is_served = session.is_serving and report.publish_id == session.publish_id
        if publish is None or receiver is None or report.publish_id != publish.publish_id:
            if is_served and report.phase == FAILED:
                # The server has itself stopped serving these weights.
                self.failures.make_stale(session, report.message)
            return
        if report.phase == FAILED:
            self.fail(publish, receiver, report.message or "it failed")
            return
        reached = {LOADED: [receiver.loaded], SERVING: [receiver.loaded, receiver.serving]}
        for wait in reached.get(report.phase, []):
            if not wait.done():
                wait.set_result(report)

    def fail(self, publish: Publish, receiver: Receiver, cause: str) -> None:
        """Ends a receiver as failed; only the first call for a receiver has an effect."""
        if receiver.cause:
            return
        session, receiver.cause = receiver.session, cause
        self._open.pop(session.key, None)
        if self._fleet.find(session.key) is session:
            self._allow_more_time(publish)
        self.membership.forget(publish.order.communicator.communicator_id)
        abort = fleet_pb2.AbortPublish(publish_id=publish.publish_id, reason=cause)
        session.send(fleet_pb2.ControllerMessage(abort=abort))
        self.failures.make_stale(session, cause)
        for wait in (receiver.loaded, receiver.serving):
            if not wait.done():
                wait.set_result(fleet_pb2.PublishReport(phase=FAILED, message=cause))

    def abandon(self, publish: Publish, cause: str) -> None:
        """Fails all receivers that were told and have not ended: those that serve keep on."""
        self.membership.forget(publish.order.communicator.communicator_id)
        for receiver in publish.receivers:
            if self._open.get(receiver.session.key) == (publish, receiver):
                self.fail(publish, receiver, cause)

    def _allow_more_time(self, publish: Publish) -> None:
        """Doubles the deadline of later publishes, since this machine or network may be slow.

        This happens once for each failed publish, up to `MOST_TIME` times the setting. Callers do
        not call it for lost servers.
        """
        deadline_s = publish.order.bucket_deadline_s
        largest_s = MOST_TIME * self._settings.bucket_deadline_s
        if deadline_s == self.bucket_deadline_s < largest_s:
            self.bucket_deadline_s = 2 * deadline_s
            self._run.events.warn(
                f"a publish failed: each bucket may take {self.bucket_deadline_s:g} s from now on "
                f"(weights.bucket_deadline_s = {self._settings.bucket_deadline_s:g})"
            )

    def server_lost(self, session: ServerSession) -> None:
        """Ends all waits for a server that was lost."""
        self.questions.server_lost(session)
        self.membership.server_lost(session.key)
        self.holders.discard(session.key)
        if session.key in self._open:
            self.fail(*self._open[session.key], "the server is gone")
