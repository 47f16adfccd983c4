"""Writes the results of each step, of each evaluation and of the whole run."""

import asyncio
import json
import time
from collections.abc import Sequence

from slipstream.core.run_folder import TRACE
from slipstream.learner.controller.events import Severity
from slipstream.learner.controller.leasing.books import Books
from slipstream.learner.controller.leasing.scheduler import Scheduler
from slipstream.learner.controller.part import OrderTimes, Part, Tasks
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.reporting.metrics import RunRecorder
from slipstream.learner.controller.reporting.result_files import write_result
from slipstream.learner.controller.reporting.step_times import StepTimes, trace
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.learner.controller.trajectories.batches import BatchFormer, Trained
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.v1 import fleet_pb2, status_pb2, trainer_pb2

# Time between two looks at the ledger, which counts all trajectories that wait.
LEDGER_S = 2.0


class Results(Part):
    """Gathers the numbers of a run from its parts, for its journal and its result files."""

    def __init__(
        self,
        run: Run,
        books: Books,
        recorder: RunRecorder,
        *,
        intake: Intake,
        former: BatchFormer,
        publisher: Publisher,
        scheduler: Scheduler,
    ) -> None:
        self._run, self._books, self._recorder = run, books, recorder
        self._intake, self._former = intake, former
        self._publisher, self._scheduler = publisher, scheduler
        self._folder, self._times = run.config.run_dir, StepTimes()
        # Done when the last evaluation is on disk; never done after a failure of the disk.
        self._evaluated: asyncio.Future[None] | None = None

    def restore(self, history: RunHistory) -> None:
        """Takes over the work of earlier servers."""
        self._recorder.rate.earlier = history.servers.generated

    def tasks(self) -> Tasks:
        """Returns the task that compares the counts of tokens."""
        return {"ledger": self._watch_ledger()}

    def reported(self, session: ServerSession, report: fleet_pb2.ServerReport) -> None:
        """Notes the work of a server since its previous report."""
        self._recorder.server_report(report)
        self._times.report(session.key, report)

    def lost(self, session: ServerSession) -> None:
        """Forgets a lost server."""
        self._times.lost(session.key)

    def stepped(
        self, trained: Trained, report: trainer_pb2.StepReport, orders: Sequence[OrderTimes]
    ) -> None:
        """Writes the row of a step, unless the step was repeated and already has its row."""
        books = self._books
        books.ledger.journal_servers()
        batch, now = trained.batch, time.time()
        training = (now - report.wall_s, now)
        if trained.again and self._recorder.has_row(batch.version):
            self._run.events.add(f"version {trained.version}, trained again")
            return
        snapshot = books.ledger.snapshot()
        row = self._recorder.step(
            batch,
            report.metrics,
            advantages=report.advantages,
            training=training,
            generated_tokens=snapshot.generated - snapshot.judged,
            gauges={
                "leased_groups": float(len(books.leases.training_groups())),
                "queued_tokens": float(snapshot.queued),
                "ledger_difference": float(snapshot.difference),
                "missing_members": float(
                    max(books.leases.group_size * len(batch.groups) - len(batch.trajectories), 0)
                ),
                "filtered_groups": float(books.state.filtered_groups[batch.step]),
                "set_aside_batches": float(len(books.state.set_aside)),
                "quarantined_trajectories": float(self._intake.inspector.quarantine.total),
                **books.environments.gauges(),
                **self._publisher.totals.gauges(),
                **books.fleet.gauges(),
                "reserved_bytes": float(self._scheduler.reserved_bytes),
                **self._times.step(
                    batch.groups,
                    orders,
                    waited_s=self._former.waits.total_s(time.monotonic()),
                    lease_waits_s=self._scheduler.waited_s(),
                ),
            },
        )
        if batch.step % self._run.config.controller.sample_every_steps == 0:
            steps = trace(row, batch.groups, orders, training=training)
            write_result(self._folder / TRACE, json.dumps(steps).encode(), self._run.events.warn)
        overflows, scale = int(row.get("gradient_overflows", 0)), row.get("loss_scale")
        if overflows:
            self._run.events.add(
                f"step {batch.version}: gradients left the range of float16 {overflows} times and "
                f"were computed again; the scale of the loss is {scale:g} now"
            )
        self._run.events.add(
            f"version {report.version.step}", step=report.version.step, metrics=row
        )

    async def _watch_ledger(self) -> None:
        """Adds an error event for each hand-over of trajectories whose two counts begin to differ.

        Runs until the task is cancelled.
        """
        while True:
            await asyncio.sleep(LEDGER_S)
            self._tell_gaps()

    def _tell_gaps(self) -> None:
        for line in self._books.ledger.news():
            self._run.events.add(f"the ledger is open, {line}", Severity.ERROR)

    def evaluated(self, result: kinds.Evaluation) -> None:
        """Writes the result of an evaluation round."""
        journal = self._books.journal
        journal.append(result)
        # While the trainer writes its last model, no other record would take this one to the disk.
        self._evaluated = journal.durable()
        self._recorder.evaluation(result)

    def is_done(self) -> bool:
        """Whether each result that was passed to `evaluated` is written to disk."""
        return self._evaluated is None or self._evaluated.done()

    async def write(
        self,
        *,
        hello: trainer_pb2.TrainerHello | None,
        goodbye: trainer_pb2.TrainerGoodbye | None,
    ) -> None:
        """Marks the run as ended, writes its summary, and closes its event log.

        `hello` and `goodbye` are the trainer's messages, or None if they did not come.
        """
        progress, books = self._run.progress, self._books
        self._tell_gaps()
        progress.end()
        state = status_pb2.RunState.Name(progress.state)
        self._recorder.summary(
            ledger=books.ledger.snapshot(),
            state=books.state,
            publish=self._publisher.totals.summary(),
            weight_digest=goodbye.weight_digest.hex() if goodbye is not None else "",
            trainer_ranks=hello.world_size if hello is not None else 0,
            ending={
                "state": state.removeprefix("RUN_STATE_").lower(),
                "cause": progress.cause,
                # Whether training ended before the last step because nothing is left to learn.
                "solved": bool(progress.solved) and not progress.has_failed,
                "suspended_environments": {**books.environments.suspended()},
                "environments": self._intake.feed.summary(),
            },
        )
        await asyncio.to_thread(self._recorder.close)
        self._run.events.close(progress.state, progress.cause)
