"""Makes the parts of a controller: each once, and what it needs before it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.learner.controller.leasing.scheduler import Books, Scheduler
from slipstream.learner.controller.loop import BatchFormer, TrainerOrders
from slipstream.learner.controller.part import Part
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.reporting.metrics import RunRecorder
from slipstream.learner.controller.results import Results
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.services.environment_service import EnvironmentServicer
from slipstream.learner.controller.services.fleet_service import StatusServicer
from slipstream.learner.controller.services.trainer_service import TrainerServicer
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.learner.controller.watch import RunWatch


@dataclass(frozen=True)
class Parts:
    """The parts of one controller."""

    recorder: RunRecorder
    intake: Intake
    scheduler: Scheduler
    watch: RunWatch
    publisher: Publisher
    former: BatchFormer
    results: Results
    trainer: TrainerServicer
    environments: EnvironmentServicer
    status: StatusServicer
    # Those that take part in the events of the run, in the order in which they are told.
    all: Sequence[Part]


def make_parts(
    run: Run,
    books: Books,
    recorder: RunRecorder,
    tasks: asyncio.TaskGroup,
    *,
    publisher: Publisher | None = None,
    former: BatchFormer | None = None,
    others: Sequence[Part] = (),
) -> Parts:
    """Returns the parts of a controller, whose tasks are in `tasks`; `others` are told last.

    The modules of parts that the settings do not ask for are not imported.
    """
    intake = Intake(run, books)
    publisher = publisher or Publisher(books.fleet, run, tasks)
    scheduler = Scheduler(run, books, intake.start_afresh)
    former = former or BatchFormer(books, tasks)
    results = Results(
        run, books, recorder, intake=intake, former=former, publisher=publisher, scheduler=scheduler
    )
    environments = EnvironmentServicer(run, books, intake)
    evaluators: list[Part] = []
    if run.config.evaluations:
        from slipstream.extensions.evaluation.controller import Evaluator

        on_result = results.evaluated
        evaluators += [Evaluator(run, books, intake, publisher, scheduler, on_result=on_result)]
    if run.config.controller.client_loop:
        from slipstream.extensions.tinker.controller import Operations

        evaluators.append(Operations(run, books, intake, publisher, scheduler, former))
    optional: list[Part] = []
    if run.config.weights.storage_url is not None:
        from slipstream.extensions.stored_weights.controller import StoredPublisher

        optional.append(StoredPublisher(books.fleet, run, tasks, publisher=publisher))
    elif run.config.controller.turns != "off":
        from slipstream.extensions.turns.controller import EngineTurns

        optional.append(EngineTurns(books.fleet, run))
    every = (results, *evaluators, environments, publisher, *optional, *others)
    trainer = TrainerServicer(run, TrainerOrders(run, books.leases, former, publisher, parts=every))
    return Parts(
        recorder=recorder,
        intake=intake,
        scheduler=scheduler,
        watch=RunWatch(run, books, publisher, intake.take_back),
        publisher=publisher,
        former=former,
        results=results,
        trainer=trainer,
        environments=environments,
        status=StatusServicer(run, books, scheduler, newest_metrics=lambda: recorder.newest),
        all=every,
    )
