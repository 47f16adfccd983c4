"""Makes the parts of the controller, restores them from the journal, and runs them to the end."""

import asyncio
import contextvars
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from slipstream.core.errors import ConfigError, ProtocolError, SlipstreamError
from slipstream.core.group_sizes import group_sizes_of
from slipstream.core.machine.description import describe_machine, describe_packages
from slipstream.core.run_folder import (
    CHECKPOINTS,
    JOURNAL,
    JOURNAL_LOG,
    check_journal_not_lost,
    move_finals,
)
from slipstream.core.settings.config import Config
from slipstream.core.settings.tables import NO_ENVIRONMENT
from slipstream.core.types import MAX_EXCUSED_ATTEMPTS
from slipstream.learner.algorithms.functions import used_functions
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.kernel import Kernel, extension_parts
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.leasing.scheduler import Books, Scheduler
from slipstream.learner.controller.loop import BatchFormer
from slipstream.learner.controller.part import Part
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import FORMAT, REMEDY, RunHistory, read_history
from slipstream.learner.controller.records.journal import Journal, read_records
from slipstream.learner.controller.records.ledger import (
    AccountedReceiver,
    TokenLedger,
    open_receiver,
)
from slipstream.learner.controller.records.snapshots import open_history, write_snapshots
from slipstream.learner.controller.reporting.metrics import open_recorder
from slipstream.learner.controller.results import RunResults
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.services.environment_service import EnvironmentServicer
from slipstream.learner.controller.services.fleet_service import FleetServicer, StatusServicer
from slipstream.learner.controller.services.trainer_service import TrainerServicer, await_goodbye
from slipstream.learner.controller.tasks import EnvironmentBook
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.learner.controller.watch import RunWatch
from slipstream.protocol.access.checked_calls import Refusals
from slipstream.protocol.access.security import Credentials, bind, create_server
from slipstream.protocol.bounds import one_line
from slipstream.protocol.checkpoints import (
    MANIFEST_NAME,
    checkpoint_path,
    complete_steps,
    passed_over,
)
from slipstream.v1 import (
    environment_pb2,
    environment_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    trajectory_pb2,
)

DRAIN_LIMIT_S = 20.0
# Seconds beyond `learner.timeout_s` that the controller waits for the trainer's goodbye. A trainer
# whose disk hangs reports this within the time, and a dead trainer is started again.
GOODBYE_LIMIT_S = 120.0
GRACE_S = 2.0
# Largest length, in characters, of the error that ended a task of the controller.
MAX_CAUSE = 500

log = logging.getLogger(__name__)

T = TypeVar("T")


class RunTasks(asyncio.TaskGroup):
    """The task group of a controller: if a task raises, the run fails; other tasks go on."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        super().__init__()
        self._fail = fail

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        """Creates a task; if it fails, the run fails and `await task` raises CancelledError.

        Raises RuntimeError once the group has ended.
        """
        name = name or str(getattr(coro, "__qualname__", coro))

        async def carry_out() -> T:
            try:
                return await coro
            except BaseException as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                if isinstance(error, SlipstreamError):
                    self._fail(str(error))
                else:
                    kind = type(error).__name__
                    log.exception("task %s", name)
                    message = one_line(": ".join(filter(None, (kind, str(error)))), MAX_CAUSE)
                    self._fail(f"task {name} of the controller ended: {message}")
                raise asyncio.CancelledError from None

        watched = carry_out()
        try:
            task = super().create_task(watched, name=name, context=context)
        except RuntimeError:
            # A late call: the gRPC server stops after the task group has ended.
            watched.close()
            coro.close()
            raise
        # A task that is cancelled before it starts never awaits `coro`.
        task.add_done_callback(lambda _: coro.close())
        return task

    @staticmethod
    async def lasting(coro: Coroutine[Any, Any, None]) -> None:
        """Awaits a coroutine that runs until it is cancelled; raises RuntimeError if it returns."""
        await coro
        raise RuntimeError("it returned")


class Controller:
    """The controller of one run; `run` serves the run and returns the exit code."""

    def __init__(self, config: Config, credentials: Credentials) -> None:
        self._config = config
        self._credentials = credentials
        run_id = config.run.id or f"{config.run.name}-{secrets.token_hex(4)}"
        self._run = ControlledRun(config, run_id)
        self._progress = self._run.progress
        algorithm = config.algorithm
        self._book = LeaseBook(
            groups_per_step=algorithm.groups_per_step,
            group_sizes=group_sizes_of(config),
            max_staleness=algorithm.max_staleness,
            num_steps=config.run.steps,
            attempts_per_lease=config.controller.max_attempts + MAX_EXCUSED_ATTEMPTS,
        )
        self._fleet = Fleet(self._run)
        self._refusals = Refusals()

    async def run(self) -> int:
        """Serves until the run's results are written; returns 1 if the run failed, else 0."""
        folder = self._config.run_dir
        async with AsyncExitStack() as stack:
            journal = stack.enter_context(Journal(folder / JOURNAL))
            history = begin(journal, folder / JOURNAL, self._run)
            self.recorder = await open_recorder(self._config, self._run.events)
            stack.callback(self.recorder.close)
            server = create_server(
                self._credentials, run_id=self._progress.run_id, refusals=self._refusals
            )
            stack.push_async_callback(server.stop, GRACE_S)
            bind(server, self._config.controller.address, self._credentials)
            receiver = AccountedReceiver(
                await open_receiver(stack, server, journal, history, self._run)
            )
            async with RunTasks(self._progress.fail) as tasks:
                held_trajectories = self._book.held
                epochs = self._fleet.epochs
                ledger = TokenLedger(epochs, held_trajectories, journal, receiver, history)
                self.books = Books(
                    leases=self._book,
                    environments=EnvironmentBook(history, seed=self._config.run.seed),
                    fleet=self._fleet,
                    journal=journal,
                    state=history,
                    ledger=ledger,
                    queue=receiver,
                )
                self._make_parts(tasks)
                warn_of_checkpoints(folder / CHECKPOINTS, history.checkpoint.step, self._run.events)
                services, health_service = self._connect(server)
                self._restore(history)
                # Every check that could refuse this start is behind it.
                for path in move_finals(folder):
                    self._run.events.add(f"the model of the run's earlier end lies in {path}")
                self._book.awaited.hold(receiver.backlog)
                await server.start()
                for part in self.parts:
                    await stack.enter_async_context(part.beside())
                self._run.events.add(f"run {self._progress.run_id} listens")
                for warning in self._config.training_warnings:
                    self._run.events.warn(warning)
                if not (self.books.environments.training() or self._config.controller.client_loop):
                    self._run.events.add(NO_ENVIRONMENT)
                lasting = {
                    "intake": self.intake.consume(),
                    "flush": ledger.flush(),
                    "scheduler": self.scheduler.lease_forever(),
                    "watch": self.watch.watch_forever(),
                }
                lasting["snapshots"] = write_snapshots(journal, folder / JOURNAL, self._run.events)
                for part in self.parts:
                    lasting |= part.tasks()
                background = [
                    tasks.create_task(tasks.lasting(coro), name=name)
                    for name, coro in lasting.items()
                ]
                for name in services:
                    await health_service.set(name, health_pb2.HealthCheckResponse.SERVING)
                while not self._progress.is_over:
                    await self._run.signal.changes(5.0)
                await health_service.enter_graceful_shutdown()
                if not journal.is_fenced:
                    await self._wind_down()
                for task in background:
                    task.cancel()
            # If it is fenced, a later controller now has the servers, the trainer and the files.
            if not journal.is_fenced:
                for part in self.parts:
                    await part.close_files()
                await self.results.write(self.trainer.goodbye)
            self.environments.relay.close()
            self.trainer.place.close()
        return 1 if self._progress.has_failed else 0

    def stop(self, reason: str) -> None:
        """Stops the run early and cleanly; a signal handler of the event loop may call it."""
        self._progress.stop(reason)

    def _make_parts(self, tasks: asyncio.TaskGroup) -> None:
        """Makes the parts, each after what it needs; their tasks are in `tasks`.

        The modules of parts that the settings do not ask for are not imported.
        """
        run = self._run
        books = self.books
        self.intake = intake = Intake(run, books)
        self.publisher = publisher = Publisher(books.fleet, run, tasks)
        self.scheduler = scheduler = Scheduler(run, books, intake.start_afresh)
        self.former = former = BatchFormer(books, tasks)
        self.results = results = RunResults(
            run, books, self.recorder, intake, former, publisher, scheduler
        )
        self.environments = EnvironmentServicer(run, books, intake)
        self.status = status = StatusServicer(run, books, scheduler, self.recorder)
        kernel = Kernel(
            run=run,
            books=books,
            intake=intake,
            publisher=publisher,
            scheduler=scheduler,
            former=former,
            results=results,
            status=status,
            refusals=self._refusals,
            tasks=tasks,
        )
        # The parts that take part in the events of the run, in the order in which they are told.
        self.parts: list[Part] = [results]
        self.parts += extension_parts(kernel, precede_publisher=True)
        self.parts += [self.environments, publisher]
        self.parts += extension_parts(kernel, precede_publisher=False)
        self.trainer = TrainerServicer(run, books.leases, former, publisher, self.parts)
        self.watch = RunWatch(run, books, publisher, intake)

    def _restore(self, history: RunHistory) -> None:
        """Restores each part, before any server connects, unless this is the run's first start."""
        if history.starts == 1:
            return
        books = self.books
        books.leases.restore(history)
        books.ledger.restore(history)
        self.former.restore(history)
        self.intake.restore(history)
        for part in self.parts:
            part.restore(history)
        open_groups = sum(not group.is_complete for group in books.leases.groups.values())
        self._run.events.add(
            f"the run resumes at version {history.version}; the journal has the batches of "
            f"{history.next_step} steps, and {open_groups} open groups go on"
        )
        newest = history.batches.get(history.version.step)
        if newest is not None:
            self._run.events.add(f"batch {newest.batch_id} was formed and is not trained yet")

    def _connect(self, server: grpc.aio.Server) -> tuple[list[str], Any]:
        """Adds all services; returns their names, and the service that tells their health."""
        # The intake is last: what others withdraw has left the book before it looks for orphans.
        self._fleet.listeners = [*self.parts, self.intake]
        fleet = FleetServicer(
            self._fleet, self._run, self.environments.relay, self.books.queue.waiting
        )
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self.trainer, server)
        status_pb2_grpc.add_StatusServiceServicer_to_server(self.status, server)
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self.environments, server)
        for part in self.parts:
            part.serve(server)
        modules = (environment_pb2, fleet_pb2, status_pb2, trainer_pb2, trajectory_pb2)
        names = [s.full_name for m in modules for s in m.DESCRIPTOR.services_by_name.values()]
        health_service = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
        return [*names, ""], health_service

    async def _wind_down(self) -> None:
        """Waits for the trainer's goodbye, then drains the servers; each wait has a time limit."""
        clock = self._run.clock
        fleet = self._fleet
        if self._progress.has_trainer and not self._progress.has_failed:
            # After this time without a call of the trainer the run fails.
            silence_s = self._config.learner.timeout_s + GOODBYE_LIMIT_S
            await await_goodbye(self._run, self.trainer, silence_s=silence_s)
        elif not self._progress.has_failed:
            self._run.events.warn("no trainer is there at the end: nothing is saved or exported")
        self._progress.waits_for("" if self._progress.has_failed else "rollout servers to drain")
        sessions = waiting = list(fleet.sessions.values())
        for session in sessions:
            fleet.order_drain(session, self._progress.cause, finish=False)
        self.intake.withdraw(list(self._book.groups.values()), "the run is over")
        until_s = clock.now_s() + DRAIN_LIMIT_S
        while waiting and clock.now_s() < until_s:
            await self._run.signal.changes(0.1, gather_s=0.0)
            waiting = [s for s in waiting if not s.drained.is_set() and fleet.find(s.key) is s]
        if waiting:
            self._run.events.warn("a rollout server did not drain in time")
        for session in sessions:
            session.outbox.close()


def begin(journal: Journal, folder: Path, run: ControlledRun) -> RunHistory:
    """Reads the journal in `folder`, adds a record of this start, and returns the state so far.

    Of a journal with a snapshot it reads what is behind that.

    The progress of `run` gets id, key and version from the journal. Raises ConfigError if the run
    may not resume here, and ProtocolError if the journal is damaged.
    """
    first = next(read_records(folder), None)
    if first is None:
        check_journal_not_lost(folder.parent)
    elif run.config.run.resume == "never":
        raise ConfigError(f"{folder} holds a run already, and run.resume is never")
    run_id = run.progress.run_id
    if first is not None:
        run_id = str(first.get("run_id", ""))
    if run.config.run.id not in (None, run_id):
        raise ConfigError(f"{folder} holds run {run_id}, and run.id is {run.config.run.id}")
    # All starts of a run share one key, so that trajectories that wait in its queue can be opened.
    key = secrets.token_hex(32)
    if first is not None and first.get("key"):
        key = str(first["key"])
    start = kinds.Start(
        format=FORMAT,
        run_id=run_id,
        key=key,
        unix_s=time.time(),
        functions={**used_functions(run.config)},
        machine=describe_machine(),
        packages=describe_packages(),
    )
    history, reader = open_history(folder, run.events.warn)
    history = read_history(reader, history, line=reader.line)
    history.add(start)
    _check_end(journal, history, folder)
    journal.settled = history.settled
    journal.state = history
    journal.append(start)
    journal.sync()
    try:
        run.progress.begin(history.run_id, bytes.fromhex(key), history.version)
    except ValueError:
        raise ProtocolError(f"the journal begins without a key of the run; {REMEDY}") from None
    return history


def _check_end(journal: Journal, history: RunHistory, folder: Path) -> None:
    """Raises ConfigError if the newest checkpoint or batch file is newer than the journal.

    The journal has then lost lines: a crash leaves at most one batch file and no checkpoint without
    a record.
    """
    version = history.version.step
    num_batches = history.next_step
    newer = ""
    saved = max(complete_steps(folder.parent / CHECKPOINTS), default=0)
    # Batches have no gaps, so that the first one behind a lost one shows the loss.
    unknown = journal.path(num_batches + 1)
    if saved > version:
        path = checkpoint_path(folder.parent / CHECKPOINTS, saved)
        newer = f"{path} is of version {saved}"
        ends = f"ends at version {version}"
    elif unknown.is_file():
        newer = f"{unknown} is of step {num_batches + 2}"
        ends = f"holds {num_batches} batches"
    if newer:
        log = folder / JOURNAL_LOG
        raise ConfigError(f"{newer}, but {log} {ends}: lines at its end are lost; {REMEDY}")


def warn_of_checkpoints(folder: Path, recorded: int, events: EventLog) -> None:
    """Warns about incomplete checkpoints in `folder`, or else about one that is missing.

    An incomplete checkpoint is a folder without a manifest that is newer than the newest complete
    checkpoint. `recorded` is the version of the journal's newest checkpoint.
    """
    newest = max(complete_steps(folder), default=0)
    base = f"a resume begins from version {newest}" if newest else "a resume begins from the start"
    over = passed_over(folder)
    for path in over:
        events.warn(f"{path} is no whole checkpoint, it has no {MANIFEST_NAME}: {base}")
    if not over and recorded > newest:
        events.warn(f"{checkpoint_path(folder, recorded)} is not there any more: {base}")
