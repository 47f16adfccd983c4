"""New weights in two phases; no server serves what was not loaded whole and proved.

Consumes: publish reports of servers, start and result of the trainer. Produces: publish orders.
Waits for: each phase of each receiver, with a deadline. Unblocked by: its report, its loss, or the
deadline: then it is stale, serves nothing and is sent the weights again between later steps.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.learner.controller.events import Severity
from slipstream.learner.controller.fleet import Fleet, ServerSession
from slipstream.learner.controller.groups import ServerKey
from slipstream.learner.controller.phases import PhaseReports
from slipstream.learner.controller.probe_gap import logit_gap
from slipstream.learner.controller.progress import RunProgress
from slipstream.learner.controller.publish_totals import PublishTotals
from slipstream.learner.controller.transport_choice import choose_for
from slipstream.protocol.codec import unpack_logprobs, version_to_pb
from slipstream.protocol.types import PolicyVersion
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2

MAX_RETRY_S = 30.0
# Publishes in a row that a server may fail before it is sent away.
MAX_FAILED_PUBLISHES = 8


@dataclass(eq=False)
class Publish:
    """One version on its way to some servers."""

    publish_id: str
    version: PolicyVersion
    verify: bool
    receivers: list[ServerSession]
    order: weights_pb2.PublishOrder
    # Its receivers were told to receive.
    is_announced: bool = False


LOADED = fleet_pb2.PUBLISH_PHASE_LOADED
SERVING = fleet_pb2.PUBLISH_PHASE_SERVING


class Publisher:
    """Decides who is sent the newest version and follows each publish to its end."""

    def __init__(self, fleet: Fleet, progress: RunProgress, tasks: asyncio.TaskGroup) -> None:
        self._fleet = fleet
        self._progress = progress
        self._settings = progress.config.weights
        self._tasks = tasks
        self._reports = PhaseReports()
        # Ranks of the trainer that send: the first ranks of a communicator.
        self.num_senders = 1
        self._members: tuple[ServerKey, ...] = ()
        self._epoch, self._communicator_id = 0, ""
        self._count = 0
        self._current: Publish | None = None
        # Servers that must not change their version now, because they are evaluated.
        self.pinned: set[ServerKey] = set()
        self.totals = PublishTotals()

    def due(self) -> list[ServerSession]:
        """The servers that should be sent the newest version now."""
        version, every = self._progress.version, self._settings.publish_every_steps
        regular = version.step % every == 0 or self._progress.all_steps_done
        return [
            session
            for session in self._fleet.sessions.values()
            if session.key not in self.pinned
            and time.monotonic() >= session.retry_publish_s
            and (
                (session.is_serving and self._is_behind(session, regular=regular))
                or session.state in (fleet_pb2.SERVER_STATE_JOINING, fleet_pb2.SERVER_STATE_STALE)
            )
        ]

    def _is_behind(self, session: ServerSession, *, regular: bool) -> bool:
        version = self._progress.version
        assert session.version is not None
        # Weights of an abandoned timeline are not the learner's.
        wanted = regular or session.version.incarnation != version.incarnation
        return wanted and session.version != version

    def trainer_lost(self) -> None:
        """Gives up the publish under way: nobody sends it any more."""
        if self._current is not None:
            self._give_up(self._current, "the trainer was lost")
        self._members = ()

    async def prepare(self) -> weights_pb2.PublishOrder | None:
        """Asks the servers that are due if they are ready; the trainer's order, or None."""
        targets = self.due()
        if not targets:
            return None
        self._count += 1
        publish_id, version = f"p{self._count:06d}", self._progress.version
        message = fleet_pb2.ControllerMessage(
            prepare=fleet_pb2.PreparePublish(publish_id=publish_id, version=version_to_pb(version))
        )
        for session in targets:
            session.send(message)
        phase = fleet_pb2.PUBLISH_PHASE_READY
        limit = self._settings.join_deadline_s
        problems = await asyncio.gather(
            *(self._problem(publish_id, session, phase, limit) for session in targets)
        )
        ready = self._drop(targets, problems)
        transport, misfits = choose_for(self._progress, {s.name: s.hello.place for s in ready})
        ready = self._drop(ready, misfits)
        if not ready:
            return None
        order = self._order(publish_id, version, ready, transport)
        self._current = Publish(publish_id, version, order.verify, ready, order)
        return order

    def start(self, start: trainer_pb2.PublishStart) -> list[weights_pb2.Receiver]:
        """The trainer can send: tells every receiver that is still there to receive."""
        publish = self._current
        if publish is None or publish.publish_id != start.publish_id:
            return []
        publish.receivers = [s for s in publish.receivers if self._fleet.find(s.key) is s]
        known = {receiver.server_id: receiver for receiver in publish.order.receivers}
        if len(publish.receivers) < len(known):
            self._give_up(publish, "a receiver was lost")
            return []
        if publish.is_announced:
            # A call that was repeated: a server told twice would join twice.
            return list(known.values())
        publish.is_announced = True
        publish.order.communicator.CopyFrom(start.communicator)
        for session in publish.receivers:
            # A server may be done before the learner says so.
            self._reports.expect(publish.publish_id, session.key, LOADED)
            session.state = fleet_pb2.SERVER_STATE_LOADING
            session.send(
                fleet_pb2.ControllerMessage(
                    receive=fleet_pb2.ReceiveWeights(
                        order=publish.order,
                        layout=start.layout,
                        first_rank=known[session.key.server_id].first_rank,
                    )
                )
            )
        return list(known.values())

    async def finish(self, result: trainer_pb2.PublishResult) -> trainer_pb2.PublishReceipt:
        """The trainer has sent all or failed: commits where the digests agree, aborts elsewhere."""
        publish, self._current = self._current, None
        if publish is None or publish.publish_id != result.publish_id:
            # A call that was repeated: its trainer leaves the communicator now.
            self._members = ()
            return trainer_pb2.PublishReceipt(discard_communicator=True)
        if result.error:
            self._give_up(publish, f"the learner could not send: {result.error}")
            return trainer_pb2.PublishReceipt(discard_communicator=True)
        digests = list(result.bucket_digests)
        try:
            problems = await asyncio.gather(
                *(self._load_problem(publish, session, digests) for session in publish.receivers)
            )
        except asyncio.CancelledError:
            # The trainer that waited is gone: nobody else would ever take them out of LOADING.
            self._give_up(publish, "the trainer was lost")
            raise
        committed = self._drop(publish.receivers, problems, publish_id=publish.publish_id)
        for session in committed:
            self._tasks.create_task(self._commit(publish, session, result.probe))
        failed = len(committed) < len(publish.receivers)
        if failed:
            self._members = ()
        self.totals.sent(result)
        return trainer_pb2.PublishReceipt(
            serving=[session.name for session in committed], discard_communicator=failed
        )

    def report(self, session: ServerSession, report: fleet_pb2.PublishReport) -> None:
        """Takes a server's report to whoever waits for it."""
        self._reports.receive(session.key, report)

    def server_lost(self, session: ServerSession) -> None:
        """Ends every wait for a server that is gone."""
        self.pinned.discard(session.key)
        if session.key in self._members:
            self._members = ()
        self._reports.fail_all(session.key, "the server is gone")

    def _wants_proof(self, targets: Sequence[ServerSession]) -> bool:
        fresh = any(not session.is_serving for session in targets)
        return fresh or self.totals.publishes % self._settings.verify_every == 0

    def _order(
        self,
        publish_id: str,
        version: PolicyVersion,
        targets: Sequence[ServerSession],
        transport: str,
    ) -> weights_pb2.PublishOrder:
        members = tuple(session.key for session in targets)
        new = members != self._members
        if new:
            self._members = members
            self._epoch += 1
            # Travels over gRPC alone: who does not know it cannot join by gloo or ipc.
            secret = secrets.token_hex(16)
            self._communicator_id = f"{self._progress.run_id}-{self._epoch}-{secret}"
        receivers, rank = [], self.num_senders
        for session in targets:
            workers = session.hello.engine_workers
            receivers.append(
                weights_pb2.Receiver(server_id=session.name, first_rank=rank, num_workers=workers)
            )
            rank += workers
        return weights_pb2.PublishOrder(
            publish_id=publish_id,
            version=version_to_pb(version),
            communicator=weights_pb2.Communicator(
                communicator_id=self._communicator_id,
                transport=transport,
                world_size=rank,
                num_senders=self.num_senders,
            ),
            new_communicator=new,
            receivers=receivers,
            verify=self._wants_proof(targets),
            bucket_deadline_s=self._settings.bucket_deadline_s,
            join_deadline_s=self._settings.join_deadline_s,
        )

    async def _problem(
        self, publish_id: str, session: ServerSession, phase: int, limit_s: float
    ) -> str:
        report = await self._reports.wait(publish_id, session.key, phase, limit_s)
        return "" if report.phase == phase else report.message or "it failed"

    async def _load_problem(
        self, publish: Publish, session: ServerSession, digests: list[bytes]
    ) -> str:
        limit_s = self._settings.join_deadline_s
        report = await self._reports.wait(publish.publish_id, session.key, LOADED, limit_s)
        if report.phase != LOADED:
            return report.message or "it failed"
        if list(report.bucket_digests) != digests:
            return "the digests of the loaded buckets are not those that were sent"
        return ""

    def _drop(
        self, sessions: Sequence[ServerSession], problems: Sequence[str], publish_id: str = ""
    ) -> list[ServerSession]:
        kept = []
        for session, problem in zip(sessions, problems, strict=True):
            if problem:
                self._make_stale(session, problem, publish_id)
            elif self._fleet.find(session.key) is session:
                kept.append(session)
        return kept

    def _make_stale(self, session: ServerSession, cause: str, publish_id: str) -> None:
        if publish_id:
            session.send(
                fleet_pb2.ControllerMessage(
                    abort=fleet_pb2.AbortPublish(publish_id=publish_id, reason=cause)
                )
            )
        if self._fleet.find(session.key) is not session:
            return
        session.failed_publishes += 1
        session.state, session.cause = fleet_pb2.SERVER_STATE_STALE, cause
        wait_s = min(0.5 * 2**session.failed_publishes, MAX_RETRY_S)
        session.retry_publish_s = time.monotonic() + wait_s
        self._progress.events.add(
            f"rollout server {session.name} is stale: {cause}", Severity.WARNING
        )
        if session.failed_publishes >= MAX_FAILED_PUBLISHES:
            session.disconnect()
            self._fleet.remove(session, f"{session.failed_publishes} publishes failed: {cause}")

    def _give_up(self, publish: Publish, cause: str) -> None:
        self._current = None
        self._members = ()
        for session in publish.receivers:
            self._reports.forget(publish.publish_id, session.key, LOADED)
            self._make_stale(session, cause, publish.publish_id)

    async def _commit(
        self, publish: Publish, session: ServerSession, probe: weights_pb2.Probe
    ) -> None:
        self._reports.expect(publish.publish_id, session.key, SERVING)
        session.send(
            fleet_pb2.ControllerMessage(
                commit=fleet_pb2.CommitPublish(
                    publish_id=publish.publish_id,
                    version=version_to_pb(publish.version),
                    probe=probe if publish.verify else None,
                )
            )
        )
        limit_s = self._settings.join_deadline_s
        report = await self._reports.wait(publish.publish_id, session.key, SERVING, limit_s)
        if report.phase != SERVING:
            self._members = ()
            self._make_stale(session, report.message or "it failed", publish.publish_id)
            return
        self.totals.served(report)
        problem = self._check_probe(probe, report) if publish.verify else ""
        if publish.verify:
            session.send(
                fleet_pb2.ControllerMessage(
                    probe_verdict=fleet_pb2.ProbeVerdict(
                        publish_id=publish.publish_id, passed=not problem, message=problem
                    )
                )
            )
        if problem:
            self._members = ()
            self._make_stale(session, problem, "")
        else:
            session.failed_publishes = 0
            session.version, session.cause = publish.version, ""
            session.state = fleet_pb2.SERVER_STATE_SERVING
        self._progress.signal.notify()

    def _check_probe(self, probe: weights_pb2.Probe, report: fleet_pb2.PublishReport) -> str:
        expected = unpack_logprobs(probe.expected_logprobs)
        got = unpack_logprobs(report.probe_logprobs)
        if len(expected) == 0 or len(expected) != len(got):
            return f"the probe asked for {len(expected)} log-probabilities and got {len(got)}"
        gap = logit_gap(expected, got)
        self.totals.verified += 1
        self.totals.probe_gap_max = max(self.totals.probe_gap_max, gap)
        if not gap <= probe.tolerance:
            return (
                "the probe's log-probabilities differ from the learner's like logits that are off "
                f"by {gap:.2e}, more than {probe.tolerance:.2e}"
            )
        return ""
