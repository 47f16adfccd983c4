"""Chooses what the trainer does next: train a batch, send or store its weights, or stop.

Consumes: complete groups, servers that need weights, the run's progress. Produces: one order for
each question. Waits for: the disk that a batch is written to, engines that come to rest.
"""

from collections.abc import Callable

from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.leasing.lease_pass import batch_wait
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.publishing.stored_publisher import StoredPublisher
from slipstream.learner.controller.publishing.turns import EngineTurns
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.trajectories.batch import FormedBatch
from slipstream.learner.controller.trajectories.batches import BatchFormer
from slipstream.v1 import trainer_pb2


class TrainerOrders:
    """Picks the trainer's next order; if there is none, reports what the run is waiting for."""

    def __init__(
        self,
        run: Run,
        book: LeaseBook,
        former: BatchFormer,
        publisher: Publisher,
        *,
        stored: StoredPublisher,
        turns: EngineTurns,
        evaluations_done: Callable[[], bool],
    ) -> None:
        self._run, self._progress = run, run.progress
        self._book, self._former = book, former
        self._publisher, self._stored, self._turns = publisher, stored, turns
        self._evaluations_done = evaluations_done
        # Version of the trainer's weights; after a restart it may be older than the run's version.
        self.trainer_version = run.progress.version

    async def next(
        self, request: trainer_pb2.NextRequest, *, must_save: bool
    ) -> trainer_pb2.Directive | FormedBatch | None:
        """Returns the next order. None if there is none yet.

        `must_save`: the run is stopping, and the trainer must still save what it has.
        Raises ProtocolError or RunFailed if the run cannot go on.
        """
        progress = self._progress
        is_behind = self.trainer_version.step < self._book.step
        if is_behind and (not progress.is_over or must_save):
            # The trainer restarted from a checkpoint, or an answer was lost.
            return await self._former.recorded(self.trainer_version.step)
        if progress.is_over:
            await self._turns.stop()
            reason = progress.cause or "the run is over"
            # The controller of a failed run waits for no export: some would be cut off.
            stop = trainer_pb2.StopOrder(reason=reason, without_model=progress.has_failed)
            return trainer_pb2.Directive(stop=stop)
        publish = await self._publisher.prepare(request)
        self._turns.end(() if publish is None else [r.server_id for r in publish.receivers])
        if publish is not None:
            return trainer_pb2.Directive(publish=publish)
        if (store := self._stored.order(request)) is not None:
            return trainer_pb2.Directive(store=store)
        if not progress.all_steps_done:
            batch = await self._former.form()
            if batch is not None:
                progress.waits_for(f"the trainer to make version {batch.version}")
                progress.moved()
                # The servers can answer while the trainer makes the version.
                version = progress.version
                self._publisher.ask_ahead(PolicyVersion(version.incarnation, batch.version))
                return batch
            progress.waits_for(batch_wait(self._book))
            return None
        if self._evaluations_done():
            progress.complete()
        else:
            progress.waits_for("the last evaluation")
        return None
