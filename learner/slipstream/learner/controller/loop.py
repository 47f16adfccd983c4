"""The controller's main loop: what the trainer does next, and what the run waits for meanwhile.

The trainer's `Next` runs the loop; all else that happens in a controller makes its conditions true.
Each task changes the run's state, calls `Signal.notify`, and waits for the signal again:

    task         takes                             makes               waits for            ended by
    -----------  --------------------------------  ------------------  -------------------  --------
    Next         complete groups, due servers      batches, orders     a batch, a server    signal
    scheduler    free places, books of tasks       leases              room, a fresh group  signal
    intake       trajectories of the queue         complete groups     the queue            delivery
    flush        ended episodes                    acknowledgements    the journal's disk   fsync
    receivers    reports on a publish              serving servers     each phase           deadline
    storage      versions in storage               publishes to read   a newer version      signal
    evaluator    servers that serve a due version  leases, results     its episodes         signal
    watch        silence, stalls, late leases      lost servers, end   time                 clock
    checkpoints  files that the trainer completes  events              time                 clock
    ledger       counts of tokens on both sides    error events        time                 clock

No wait is endless: a signal's wait has a time limit, a server or trainer that says nothing is lost,
and a run without progress fails after `controller.stall_timeout_s`. `Next` itself answers within
its limit, and the trainer calls again. At the end of the run `application.py` cancels the tasks.

Consumes: complete groups, servers that need weights, the run's progress. Produces: batches and
orders. Waits for: a batch, a server, or the end. Unblocked by: the run's signal, or the limit.
"""

import time
from collections.abc import Awaitable, Callable, Sequence

from slipstream.core.errors import ProtocolError, RunFailed
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.events import GATHER_S
from slipstream.learner.controller.leasing.lease_pass import batch_wait
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.part import Part
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.trajectories.batch import FormedBatch
from slipstream.learner.controller.trajectories.batches import BatchFormer
from slipstream.v1 import trainer_pb2 as pb


class TrainerOrders:
    """Picks the trainer's next order; if there is none, reports what the run is waiting for."""

    def __init__(
        self,
        run: Run,
        book: LeaseBook,
        former: BatchFormer,
        publisher: Publisher,
        *,
        parts: Sequence[Part],
    ) -> None:
        self._run, self._progress = run, run.progress
        self._book, self.former = book, former
        self.publisher, self.parts = publisher, parts
        # Version of the trainer's weights; after a restart it may be older than the run's version.
        self.trainer_version = run.progress.version

    async def wait(
        self,
        request: pb.NextRequest,
        limit_s: float,
        *,
        check: Callable[[], Awaitable[None]],
        must_save: Callable[[], bool],
    ) -> pb.Directive | FormedBatch:
        """Returns the first order that there is within `limit_s`, else the order to ask again.

        `check` raises once another trainer has the place: an order to this one would be lost.
        """
        until_s = time.monotonic() + limit_s
        # Operations of a client come one by one, and each is worth an answer of its own.
        gather_s = 0.0 if self._run.config.controller.client_loop else GATHER_S
        while True:
            await check()
            try:
                order = await self.next(request, must_save=must_save())
            except (ProtocolError, RunFailed) as failure:
                self._progress.fail(str(failure))
                continue
            if order is not None:
                return order
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                return pb.Directive(wait=pb.WaitOrder())
            # A server that is to be retried becomes due without a signal.
            await self._run.signal.changes(min(remaining_s, 0.25), gather_s=gather_s)

    async def next(
        self, request: pb.NextRequest, *, must_save: bool
    ) -> pb.Directive | FormedBatch | None:
        """Returns the next order, or None if there is none yet.

        `must_save` says that the run is stopping and the trainer must still save its newest
        version. Raises ProtocolError or RunFailed if the run cannot continue.
        """
        progress = self._progress
        is_behind = self.trainer_version.step < self._book.step
        if is_behind and (not progress.is_over or must_save):
            # The trainer restarted from a checkpoint, or an answer was lost.
            return await self.former.recorded(self.trainer_version.step)
        if progress.is_over:
            for part in self.parts:
                await part.before_stop()
            reason = progress.cause or "the run is over"
            # The controller of a failed run does not wait for an export, which could be cut off.
            stop = pb.StopOrder(reason=reason, without_model=progress.has_failed)
            return pb.Directive(stop=stop)
        publish = await self.publisher.prepare(request)
        receivers = () if publish is None else [each.server_id for each in publish.receivers]
        for part in self.parts:
            part.trainer_asks(receivers)
        if publish is not None:
            return pb.Directive(publish=publish)
        for part in self.parts:
            if (order := part.order(request)) is not None:
                return order
        if not progress.all_steps_done:
            given = None
            for part in self.parts:
                given = given or part.next_step()
            batch = await self.former.form(given)
            if batch is not None:
                progress.waits_for(f"the trainer to make version {batch.version}")
                progress.moved()
                # The servers can answer while the trainer makes the version.
                version = progress.version
                self.publisher.ask_ahead(PolicyVersion(version.incarnation, batch.version))
                return batch
            waits = filter(None, (part.waits_for() for part in self.parts))
            progress.waits_for(next(waits, "") or batch_wait(self._book))
            return None
        if all(part.is_done() for part in self.parts):
            progress.complete()
        else:
            progress.waits_for("the last evaluation")
        return None
