"""Publishes through storage: the trainer writes versions to it, and servers fetch them from it.

Consumes: reports of the trainer on versions in storage, and of servers that have fetched one.
Produces: store orders for the trainer; questions and publish orders for servers. Waits for: each
fetch, for `weights.storage_deadline_s`. Unblocked by: the server's answer, its loss, or the limit.
Each server has publishes of its own, so other servers and training steps do not wait for it. All
servers of such a run fetch; the trainer sends to none.
"""

import asyncio
import time
from collections import Counter

from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.kernel import Kernel
from slipstream.learner.controller.part import Part, Tasks
from slipstream.learner.controller.publishing.publish import Publish, Publisher
from slipstream.learner.controller.publishing.receivers import (
    MAX_FAILED_WHILE_NONE_SERVES,
    READY,
    retry_wait_s,
)
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import JOINING, STALE, ServerKey, ServerSession
from slipstream.protocol.codec import version_from_pb
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2

# Longest time between two looks for servers for which a publish is due.
_LOOK_S = 0.25


class StoredPublisher(Part):
    """Orders writes of versions to storage, and updates the servers that fetch from there.

    trainer:  `order` --> it writes the version while it trains on --> `stored`
    a server: due --prepare--> it fetches while it serves --READY--> receive, commit --> it serves
    """

    def __init__(
        self, fleet: Fleet, run: ControlledRun, tasks: asyncio.TaskGroup, *, publisher: Publisher
    ) -> None:
        self._fleet = fleet
        self._run = run
        self._tasks = tasks
        self._settings = run.config.weights
        self._publisher = publisher
        self._newest: trainer_pb2.StoredReport | None = None
        # Folder of the version that the trainer writes; "" if it writes none.
        self._ordered = ""
        self._num_orders = 0
        self._num_publishes = 0
        # Number of writes that failed in a row, and the time before which no write is ordered.
        self._failed = 0
        self._retry_s = 0.0
        # By server: the version that it fetches now, and the number of loads that were ordered.
        self._fetches: dict[ServerKey, trainer_pb2.StoredReport] = {}
        self._loads: Counter[ServerKey] = Counter()
        # By server: the version about which the newest warning said that it is too old for a lease.
        self._too_old: dict[ServerKey, PolicyVersion | None] = {}

    def order(self, trainer: trainer_pb2.NextRequest) -> trainer_pb2.Directive | None:
        """Returns the order to write the trainer's version, or None if no server needs it now."""
        version = version_from_pb(trainer.version)
        if trainer.can_store:
            # The trainer has ended the last order, or another trainer has taken over.
            self._ordered = ""
        newest = None if self._newest is None else version_from_pb(self._newest.version)
        # Only the run's newest version, once.
        is_wanted = newest != version == self._run.progress.version and bool(self._fleet.sessions)
        if not trainer.can_store or not is_wanted or time.monotonic() < self._retry_s:
            return None
        self._num_orders += 1
        name = f"{version.incarnation}-{version.step:08d}-{time.time_ns():x}-{self._num_orders}"
        self._ordered = f"{self._run.progress.run_id}/{name}"
        order = trainer_pb2.StoreOrder(version=trainer.version, folder=self._ordered)
        return trainer_pb2.Directive(store=order)

    def stored(self, report: trainer_pb2.StoredReport) -> trainer_pb2.StoredReceipt:
        """Notes the result of a store order; the receipt has the keys of manifests to keep."""
        if report.folder and report.folder == self._ordered:
            self._ordered = ""
            if report.error:
                self._failed += 1
                self._retry_s = time.monotonic() + retry_wait_s(self._failed)
                if self._failed >= MAX_FAILED_WHILE_NONE_SERVES:
                    self._run.progress.fail(
                        f"{self._failed} versions in a row could not be written to storage, the "
                        f"last one: {report.error}"
                    )
                else:
                    self._run.events.warn(
                        f"version {report.version.step} is not in storage: {report.error}"
                    )
            else:
                self._failed = 0
                self._newest = report
                self._publisher.totals.stored(report)
                self._run.signal.notify()
        needed = {fetch.stored.key for fetch in self._fetches.values()}
        if self._newest is not None:
            needed.add(self._newest.stored.key)
        return trainer_pb2.StoredReceipt(needed=sorted(needed))

    def tasks(self) -> Tasks:
        return {"storage": self.run_forever()}

    async def run_forever(self) -> None:
        """Begins each publish that is due, and warns about servers that are too old for leases."""
        while True:
            newest = self._newest
            over = self._run.progress.is_over
            for session in list(self._fleet.sessions.values()):
                self._warn_if_too_old(session)
                is_busy = session.key in self._fetches or session.key in self._fleet.pinned
                too_early = time.monotonic() < session.retry_publish_s
                if newest is None or is_busy or too_early or over:
                    continue
                is_behind = session.version != version_from_pb(newest.version)
                if (session.is_serving and is_behind) or session.state in (JOINING, STALE):
                    self._fetches[session.key] = newest
                    self._tasks.create_task(self._publish(session, newest))
            await self._run.signal.changes(_LOOK_S)

    def lost(self, session: ServerSession) -> None:
        self._loads.pop(session.key, None)
        self._too_old.pop(session.key, None)

    async def _publish(self, session: ServerSession, report: trainer_pb2.StoredReport) -> None:
        """Lets a server fetch a version while it serves, and then load it."""
        self._num_publishes += 1
        prepare = fleet_pb2.PreparePublish(
            publish_id=f"s{self._num_publishes:06d}", version=report.version, stored=report.stored
        )
        questions = self._publisher.questions
        settings = self._settings
        [question] = questions.ask([session], prepare)
        # The server has the storage limit too, and its error names the storage.
        limit_s = settings.storage_deadline_s + settings.join_deadline_s
        try:
            await self._run.clock.wait([question.answer], limit_s)
        finally:
            del self._fetches[session.key]
            questions.forget(question)
        is_gone = self._fleet.find(session.key) is not session or session.is_leaving
        if is_gone or self._run.progress.is_over:
            return
        problem = f"no answer within {limit_s:g} s"
        if question.answer.done():
            answer = question.answer.result()
            problem = "" if answer.phase == READY else answer.message or "it failed"
        if problem:
            cause = f"version {report.version.step} from storage: {problem}"
            self._publisher.failures.fetch_failed(session, cause)
            return
        if session.key in self._fleet.pinned:
            return
        self._publisher.totals.fetched(answer)
        # The server's requests wait from here on.
        publish_id = prepare.publish_id
        # The rule of all publishes: the first, every n-th, and each to a server that did not serve.
        is_verified = self._loads[session.key] % settings.verify_every == 0
        self._loads[session.key] += 1
        order = weights_pb2.PublishOrder(
            publish_id=publish_id,
            version=report.version,
            communicator=weights_pb2.Communicator(
                communicator_id=publish_id, transport="storage", world_size=1
            ),
            new_communicator=True,
            verify=is_verified or not session.is_serving,
            bucket_deadline_s=settings.bucket_deadline_s,
            join_deadline_s=settings.join_deadline_s,
        )
        digests = tuple(report.bucket_digests)
        self._publisher.tell(Publish(order, [session], digests=digests, probe=report.probe), None)

    def _warn_if_too_old(self, session: ServerSession) -> None:
        version = session.version
        step = self._run.progress.version.step
        bound = self._run.config.algorithm.max_staleness
        if not session.is_serving or version is None or version.step + bound >= step:
            return
        if self._too_old.get(session.key) != version:
            self._too_old[session.key] = version
            self._run.events.warn(
                f"rollout server {session.name} gets no groups: its version {version.step} is too "
                f"old for step {step + 1} (algorithm.max_staleness = {bound}); it has not fetched "
                "a newer one from storage yet"
            )


def part(kernel: Kernel) -> StoredPublisher:
    """Returns the part of the controller that publishes through storage."""
    return StoredPublisher(
        kernel.books.fleet,
        kernel.run,
        kernel.tasks,
        publisher=kernel.publisher,
    )
