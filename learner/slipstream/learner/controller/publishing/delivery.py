"""The delivery of one version to one server: the commit, and the server's success or failure.

Consumes: a server's reports. Produces: commits, verdicts on probes, aborts. Waits for: the end of
each receiver, with a deadline. Unblocked by: its report, its loss, or a failure of the publish.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from slipstream.core.types import PolicyVersion, ServerId
from slipstream.learner.controller.publishing.phases import (
    FAILED,
    LOADED,
    SERVING,
    PhaseReports,
    Wait,
)
from slipstream.learner.controller.publishing.publish_totals import PublishTotals, check_probe
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.server_states import ServerEvent, ServerKey
from slipstream.learner.controller.servers.session import JoinedOrder, ServerSession
from slipstream.protocol.codec import version_to_pb
from slipstream.v1 import fleet_pb2, weights_pb2

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
# Failed publishes of one session after which the server is sent away.
MAX_FAILED_PUBLISHES = 8
# Failed publishes after which the server shares no publish with others.
MAX_JOINT_FAILURES = 2
# Failed publishes of one server, while no server serves, after which the run fails. By then the
# server was sent away once and came back.
MAX_FAILED_WHILE_NONE_SERVES = 2 * MAX_FAILED_PUBLISHES

# A deadline is raised to this multiple of `weights.bucket_deadline_s` at most.
MOST_TIME = 8
# Largest number of servers, by name, whose failed publishes are counted; the oldest goes first.
MAX_FAILING = 1000


@dataclass(frozen=True)
class FailureCounts:
    """Counts of consecutive failed publishes to one server."""

    # Failures since this session began or last served.
    in_session: int
    # Failures since the server last served, in this or an earlier epoch.
    of_server: int
    # Failures of the server since any server last served.
    while_none_served: int

    @property
    def needs_own_publish(self) -> bool:
        """Whether the server gets its own publish, after the healthy servers."""
        return self.of_server >= MAX_JOINT_FAILURES


class Consequence(Enum):
    """The consequence of a failed publish."""

    # The server is sent the weights again after `retry_wait_s`.
    RETRY = "retry"
    # The controller ends the server's stream; the server may join again.
    SEND_AWAY = "send away"
    # No server could be sent its weights.
    FAIL_RUN = "fail run"


def consequence(counts: FailureCounts, *, is_any_serving: bool) -> Consequence:
    """Returns the consequence of a failed publish, which `counts` already includes.

    The run fails only if `is_any_serving` is false.
    """
    if counts.while_none_served >= MAX_FAILED_WHILE_NONE_SERVES and not is_any_serving:
        return Consequence.FAIL_RUN
    is_last = counts.in_session >= MAX_FAILED_PUBLISHES
    return Consequence.SEND_AWAY if is_last else Consequence.RETRY


def retry_wait_s(num_failed: int) -> float:
    """Returns the seconds between a failure and the next attempt, after failures in a row."""
    return min(FIRST_RETRY_S * 2.0 ** max(num_failed - 1, 0), MAX_RETRY_S)


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
class Publish:
    """The delivery of one version to some servers."""

    publish_id: str
    version: PolicyVersion
    verify: bool
    receivers: list[ServerSession]
    order: weights_pb2.PublishOrder
    # Digests of the buckets if the trainer sent them beforehand; otherwise empty.
    digests: tuple[bytes, ...] = ()
    # Whether the receivers were told to receive, and when, by `time.monotonic`.
    is_announced: bool = False
    told_s: float = 0.0
    # Time at which the publish was ordered, in Unix seconds.
    ordered_s: float = field(default_factory=lambda: time.time())
    # The servers that hold this trainer's base weights, so that adapters are enough for them.
    holders: set[ServerKey] = field(default_factory=set)
    # Receivers that failed in this publish.
    failed: set[ServerKey] = field(default_factory=set)

    @property
    def communicator_id(self) -> str:
        """Id of this publish's communicator; the next publish may use another one."""
        return self.order.communicator.communicator_id


class Deliveries:
    """Follows every receiver of every publish to its end.

    Phases of a receiver: `announce` tells it to receive; `commit` tells it to resume and waits for
    its report that it serves. Then the probe, if any, is checked, and the server's version is
    noted. Any failure makes the server stale (`make_stale`). The rule `consequence` then decides:
    another publish, the end of the server's stream, or the end of the run.
    """

    def __init__(
        self, fleet: Fleet, run: Run, tasks: asyncio.TaskGroup, reports: PhaseReports
    ) -> None:
        self._fleet, self._run, self._progress = fleet, run, run.progress
        self._settings = run.config.weights
        # Seconds that a bucket of the next publish may take.
        self.bucket_deadline_s = self._settings.bucket_deadline_s
        self._tasks, self.reports = tasks, reports
        self.membership = Membership(run.progress.run_id)
        self.totals = PublishTotals()
        # Failed publishes in a row of each server, over all of its epochs. The first counts since
        # any server served last, the second since that server served last.
        self._failed_while_none_served: Counter[ServerId] = Counter()
        self._failed: Counter[ServerId] = Counter()

    def together(self, due: Sequence[ServerSession]) -> list[ServerSession]:
        """Returns the servers of `due` that share the next publish.

        Servers whose last two publishes failed are left out, since a member that fails makes all
        others stale. Once only such servers are due, each gets a publish of its own.
        """
        sound = [s for s in due if not self._counts(s).needs_own_publish]
        return sound or sorted(due, key=lambda s: self._failed[s.key.server_id])[:1]

    def announce(self, publish: Publish, layout: weights_pb2.WeightLayout | None) -> None:
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
        publish.is_announced, publish.told_s = True, time.monotonic()
        for session in publish.receivers:
            # A server may have loaded before the trainer reports its result.
            self.reports.expect(publish.publish_id, session.key, LOADED)
            session.on(ServerEvent.RECEIVE)
            own = fleet_pb2.ReceiveWeights(first_rank=ranks[session.key.server_id])
            session.send(JoinedOrder(fleet_pb2.ControllerMessage(receive=own), shared))
        if publish.digests:
            self.commit(publish, publish.digests, None)

    def commit(
        self, publish: Publish, digests: Sequence[bytes], probe: weights_pb2.Probe | None
    ) -> None:
        """Orders the receivers to resume once they have loaded the buckets with these digests.

        With `publish.verify` they also score `probe`. A task follows each receiver to its end.
        """
        commit = fleet_pb2.CommitPublish(
            publish_id=publish.publish_id,
            version=version_to_pb(publish.version),
            probe=probe if publish.verify else None,
            bucket_digests=digests,
        )
        shared = fleet_pb2.ControllerMessage(commit=commit).SerializeToString()
        own = fleet_pb2.ControllerMessage(commit=fleet_pb2.CommitPublish())
        order = JoinedOrder(own, shared)
        # The limit covers buckets on their way, each with its deadline, loading and resuming.
        settings = self._settings
        bucket_deadline_s = publish.order.bucket_deadline_s
        limit_s = 2 * settings.join_deadline_s + len(digests) * bucket_deadline_s
        waits = {}
        for session in publish.receivers:
            wait = self.reports.expect(publish.publish_id, session.key, SERVING)
            waits[session.key] = wait
            session.send(order)
            self._tasks.create_task(self._follow(publish, session, digests, probe, wait))
        self._tasks.create_task(self._expire(publish.publish_id, waits, limit_s))

    async def _expire(
        self, publish_id: str, waits: Mapping[ServerKey, Wait], limit_s: float
    ) -> None:
        """Fails each wait that is still open after `limit_s`; one timer covers all receivers."""
        await self._run.clock.wait(waits.values(), limit_s)
        for key in [key for key, wait in waits.items() if not wait.done()]:
            self.reports.abandon(publish_id, key, f"no answer within {limit_s:g} s")

    def loaded(
        self,
        publish: Publish,
        session: ServerSession,
        digests: Sequence[bytes],
        report: fleet_pb2.PublishReport,
    ) -> None:
        """Handles a LOADED or FAILED report; wrong digests count as a failure of the receiver."""
        if report.phase == FAILED:
            self.fail(publish, session, report.message or "it failed")
        elif list(report.bucket_digests) != list(digests):
            problem = "the digests of the loaded buckets are not those that were sent"
            self.fail(publish, session, problem)

    async def _follow(
        self,
        publish: Publish,
        session: ServerSession,
        digests: Sequence[bytes],
        probe: weights_pb2.Probe | None,
        wait: Wait,
    ) -> None:
        report = await wait
        self.reports.forget(publish.publish_id, session.key, SERVING)
        load = self.reports.reported(publish.publish_id, session.key, LOADED)
        if report.phase != SERVING:
            self.fail(publish, session, report.message or "it failed")
        elif load is not None:
            # The trainer's call may see this report only later.
            self.loaded(publish, session, digests, load)
        if session.key in publish.failed:
            return
        now_s = time.monotonic()
        self.totals.served(
            report, told_s=now_s - publish.told_s, unserved_s=now_s - session.unserved_since_s
        )
        problem = ""
        if publish.verify:
            assert probe is not None
            problem = check_probe(probe, report, self.totals)
            verdict = fleet_pb2.ProbeVerdict(
                publish_id=publish.publish_id, passed=not problem, message=problem
            )
            session.send(fleet_pb2.ControllerMessage(probe_verdict=verdict))
        if problem:
            self.membership.forget(publish.communicator_id)
            # The matrices may be wrong as well as the adapters.
            publish.holders.discard(session.key)
            self.make_stale(session, problem)
        else:
            if not publish.order.adapters_alone:
                publish.holders.add(session.key)
            session.failed_publishes = 0
            self._failed_while_none_served.clear()
            del self._failed[session.key.server_id]
            session.version = publish.version
            if not session.is_leaving:
                session.cause = ""
            session.publish_id = publish.publish_id
            session.on(ServerEvent.PUBLISHED)
        self._run.signal.notify()

    def fail(self, publish: Publish, session: ServerSession, cause: str) -> None:
        """Notes the failure of a receiver; only the first call for a receiver has an effect."""
        if session.key in publish.failed:
            return
        publish.failed.add(session.key)
        if self._fleet.find(session.key) is session:
            self._allow_more_time(publish)
        self.membership.forget(publish.communicator_id)
        self.make_stale(session, cause, publish.publish_id)
        self.reports.abandon(publish.publish_id, session.key, cause)

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

    def make_stale(self, session: ServerSession, cause: str, publish_id: str = "") -> None:
        """Takes a server out of service until it has a whole version.

        If `publish_id` is not "", also orders the server to abort this publish.
        """
        if publish_id:
            abort = fleet_pb2.AbortPublish(publish_id=publish_id, reason=cause)
            session.send(fleet_pb2.ControllerMessage(abort=abort))
        if self._fleet.find(session.key) is not session:
            return
        session.failed_publishes += 1
        session.on(ServerEvent.FAILED)
        if session.is_leaving:
            return
        session.cause = cause
        self._run.events.warn(f"rollout server {session.name} is stale: {cause}")
        self._follow_failure(session, cause)

    def fetch_failed(self, session: ServerSession, cause: str) -> None:
        """Notes a failed fetch: a serving server keeps its version, any other becomes stale."""
        if not session.is_serving:
            self.make_stale(session, cause)
            return
        assert session.version is not None
        session.failed_publishes += 1
        self._run.events.warn(
            f"rollout server {session.name} keeps version {session.version.step}: {cause}"
        )
        self._follow_failure(session, cause)

    def _follow_failure(self, session: ServerSession, cause: str) -> None:
        if self._note_failure(session, cause) is Consequence.RETRY:
            session.retry_publish_s = time.monotonic() + retry_wait_s(session.failed_publishes)
        else:
            self._disconnect(session, f"{session.failed_publishes} publishes failed: {cause}")

    def send_away(self, session: ServerSession, cause: str) -> None:
        """Ends the stream of a server whose publishes all fail; other servers get its leases.

        The server may join again.
        """
        self._disconnect(session, cause)
        self._note_failure(session, cause)

    def _disconnect(self, session: ServerSession, cause: str) -> None:
        session.disconnect()
        self._fleet.remove(session, cause)

    def _counts(self, session: ServerSession) -> FailureCounts:
        server_id = session.key.server_id
        return FailureCounts(
            in_session=session.failed_publishes,
            of_server=self._failed[server_id],
            while_none_served=self._failed_while_none_served[server_id],
        )

    def _note_failure(self, session: ServerSession, cause: str) -> Consequence:
        """Counts a failed publish and returns its `consequence`; FAIL_RUN also fails the run."""
        self._failed_while_none_served[session.key.server_id] += 1
        self._failed[session.key.server_id] += 1
        for failures in (self._failed, self._failed_while_none_served):
            if len(failures) > MAX_FAILING:
                del failures[next(iter(failures))]
        counts = self._counts(session)
        is_any_serving = bool(self._fleet.serving()) or self._progress.is_over
        found = consequence(counts, is_any_serving=is_any_serving)
        if found is Consequence.FAIL_RUN:
            self._progress.fail(
                f"no rollout server serves, and {counts.while_none_served} publishes in a row to "
                f"{session.name} failed, the last one: {cause}"
            )
        return found
