"""Writes down what each step, each evaluation and the whole run came to."""

import asyncio
import time
from dataclasses import asdict

from slipstream.learner.controller.evaluation import EvaluationResult
from slipstream.learner.controller.leasing.books import Books
from slipstream.learner.controller.leasing.scheduler import Scheduler
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.reporting.metrics import RunRecorder
from slipstream.learner.controller.reporting.run_facts import Ending
from slipstream.learner.controller.restoration import journal_evaluation, journal_servers
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.trajectories.batches import BatchFormer, Trained
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.v1 import status_pb2, trainer_pb2


class Results:
    """Gathers the numbers of a run from its parts, for its journal and its files of results."""

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

    def stepped(self, trained: Trained, report: trainer_pb2.StepReport) -> bool:
        """Writes the row of a step; returns False for a step that is trained again."""
        books = self._books
        journal_servers(books.journal, books.ledger)
        batch, now = trained.batch, time.time()
        if trained.again and self._recorder.has_row(batch.version):
            self._run.events.add(f"version {trained.version}, trained again")
            return False
        snapshot = books.ledger.snapshot()
        row = self._recorder.step(
            batch,
            report.metrics,
            training=(now - report.wall_s, now),
            generated_tokens=snapshot.generated - snapshot.judged,
            gauges={
                "leased_groups": float(len(books.leases.training_groups())),
                "queued_tokens": float(snapshot.queued),
                "ledger_difference": float(snapshot.difference),
                "missing_members": float(
                    max(books.leases.group_size * len(batch.groups) - len(batch.trajectories), 0)
                ),
                "filtered_groups": float(self._intake.group_filter.by_step[batch.step]),
                "set_aside_batches": float(self._former.num_set_aside),
                "quarantined_trajectories": float(self._intake.inspector.quarantine.total),
                **books.environments.gauges(),
                **self._publisher.totals.gauges(),
                **books.fleet.gauges(),
                **self._scheduler.gauges(),
            },
        )
        books.journal.append("busy", **asdict(self._recorder.facts.busy.of_this_start()))
        overflows, scale = int(row.get("gradient_overflows", 0)), row.get("loss_scale")
        if overflows:
            self._run.events.add(
                f"step {batch.version}: gradients left the range of float16 {overflows} times and "
                f"were computed again; the scale of the loss is {scale:g} now"
            )
        self._run.events.add(
            f"version {report.version.step}", step=report.version.step, metrics=row
        )
        return True

    def evaluated(self, result: EvaluationResult) -> None:
        """Writes the result of an evaluation round."""
        journal_evaluation(self._books.journal, result)
        self._recorder.evaluation(result)

    async def write(
        self,
        evaluations: list[EvaluationResult],
        *,
        hello: trainer_pb2.TrainerHello | None,
        goodbye: trainer_pb2.TrainerGoodbye | None,
    ) -> None:
        """Ends the run's progress, and writes its summary."""
        progress, books = self._run.progress, self._books
        progress.end()
        self._recorder.summary(
            ledger=books.ledger.snapshot(),
            filtered_groups=self._intake.group_filter.by_step.total(),
            set_aside_batches=self._former.num_set_aside,
            evaluations=evaluations,
            publish=self._publisher.totals.summary(),
            weight_digest=goodbye.weight_digest.hex() if goodbye is not None else "",
            trainer_ranks=hello.world_size if hello is not None else 0,
            ending=Ending(
                state=status_pb2.RunState.Name(progress.state).removeprefix("RUN_STATE_").lower(),
                cause=progress.cause,
                solved=bool(progress.solved) and not progress.has_failed,
                suspended_environments=books.environments.suspended(),
            ),
        )
        await asyncio.to_thread(self._recorder.close)
        self._run.events.close(progress.state, progress.cause)
