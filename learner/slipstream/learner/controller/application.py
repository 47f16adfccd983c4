"""Assembles the parts of the controller and runs them until the run's summary is written."""

import asyncio
import contextvars
import logging
import secrets
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from slipstream.core.errors import SlipstreamError
from slipstream.core.run_folder import CHECKPOINTS, JOURNAL
from slipstream.core.settings.config import Config
from slipstream.core.types import MAX_EXCUSED_ATTEMPTS
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.leasing.scheduler import Books
from slipstream.learner.controller.parts import Parts, make_parts
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.records.ledger import (
    AccountedReceiver,
    TokenLedger,
    open_receiver,
)
from slipstream.learner.controller.reporting.metrics import RunRecorder, open_recorder
from slipstream.learner.controller.restoration import begin, restore, warn_of_checkpoints
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.services.fleet_service import FleetServicer
from slipstream.learner.controller.services.trainer_service import await_goodbye
from slipstream.learner.controller.tasks import EnvironmentBook
from slipstream.protocol.access.security import Credentials, bind, create_server
from slipstream.protocol.bounds import one_line
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

NO_ENVIRONMENT = (
    "the settings have no environment: no step begins before there is one; add [[environments]], "
    "or give the run one by slipstream submit MODULE:CLASS"
)


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
                    said = one_line(": ".join(filter(None, (kind, str(error)))), MAX_CAUSE)
                    self._fail(f"task {name} of the controller ended: {said}")
                raise asyncio.CancelledError from None

        told = carry_out()
        try:
            task = super().create_task(told, name=name, context=context)
        except RuntimeError:
            # A late call: the gRPC server stops after the task group has ended.
            told.close()
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

    def __init__(
        self,
        config: Config,
        credentials: Credentials,
        *,
        make: Callable[[Run, Books, RunRecorder, asyncio.TaskGroup], Parts] = make_parts,
    ) -> None:
        """Takes the settings and the function that makes the parts."""
        self._make_parts = make
        self._config = config
        self._credentials = credentials
        run_id = config.run.id or f"{config.run.name}-{secrets.token_hex(4)}"
        self._run = Run.of(config, run_id)
        self._progress = self._run.progress
        algorithm = config.algorithm
        self._book = LeaseBook(
            groups_per_step=algorithm.groups_per_step,
            group_size=algorithm.group_size,
            max_staleness=algorithm.max_staleness,
            num_steps=config.run.steps,
            attempts_per_lease=config.controller.max_attempts + MAX_EXCUSED_ATTEMPTS,
        )
        self._fleet = Fleet(self._run)
        # Made by `run`.
        self._books: Books
        self._parts: Parts

    async def run(self) -> int:
        """Serves until the run's results are written; returns 1 if the run failed, else 0."""
        folder = self._config.run_dir
        async with AsyncExitStack() as stack:
            journal = stack.enter_context(Journal(folder / JOURNAL))
            history = begin(journal, folder / JOURNAL, self._run)
            recorder = await open_recorder(self._config, self._run.events)
            stack.callback(recorder.close)
            server = create_server(self._credentials, run_id=self._progress.run_id)
            stack.push_async_callback(server.stop, GRACE_S)
            bind(server, self._config.controller.address, self._credentials)
            receiver = AccountedReceiver(
                await open_receiver(stack, server, journal, history, self._run)
            )
            async with RunTasks(self._progress.fail) as tasks:
                held, epochs = self._book.held, self._fleet.epochs
                ledger = TokenLedger(epochs, held, journal, receiver, history)
                self._books = books = Books(
                    leases=self._book,
                    environments=EnvironmentBook(history, seed=self._config.run.seed),
                    fleet=self._fleet,
                    journal=journal,
                    state=history,
                    ledger=ledger,
                    queue=receiver,
                )
                self._parts = parts = self._make_parts(self._run, books, recorder, tasks)
                warn_of_checkpoints(folder / CHECKPOINTS, history.checkpoint.step, self._run.events)
                services, health_service = self._connect(server)
                restore(books, parts.former, [parts.intake, *parts.all], history, self._run)
                self._book.awaited.hold(receiver.backlog)
                await server.start()
                if self._config.tracking.prometheus is not None:
                    # The library takes a third of a second to import.
                    from slipstream.extensions.prometheus.controller import RunCollector
                    from slipstream.extensions.prometheus.endpoint import metrics_endpoint

                    collector = RunCollector(self._config, books, parts)
                    serving = metrics_endpoint(self._config, "controller", [collector])
                    await stack.enter_async_context(serving)
                self._run.events.add(f"run {self._progress.run_id} listens")
                if warning := self._config.algorithm.staleness_warning:
                    self._run.events.warn(warning)
                if not (books.environments.training() or self._config.controller.client_loop):
                    self._run.events.add(NO_ENVIRONMENT)
                lasting = {
                    "intake": parts.intake.consume(),
                    "flush": books.ledger.flush(),
                    "scheduler": parts.scheduler.lease_forever(),
                    "watch": parts.watch.watch_forever(),
                }
                for part in parts.all:
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
                await parts.results.write(parts.trainer.goodbye)
            parts.environments.relay.close()
            parts.trainer.place.close()
        return 1 if self._progress.has_failed else 0

    def stop(self, reason: str) -> None:
        """Stops the run early and cleanly; a signal handler of the event loop may call it."""
        self._progress.stop(reason)

    def _connect(self, server: grpc.aio.Server) -> tuple[list[str], Any]:
        """Adds all services; returns their names, and the service that tells their health."""
        parts = self._parts
        # The intake is last: what others withdraw has left the book before it looks for orphans.
        self._fleet.listeners = [*parts.all, parts.intake]
        fleet = FleetServicer(self._fleet, self._run, parts.environments.relay)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(parts.trainer, server)
        status_pb2_grpc.add_StatusServiceServicer_to_server(parts.status, server)
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(parts.environments, server)
        for part in parts.all:
            part.serve(server)
        modules = (environment_pb2, fleet_pb2, status_pb2, trainer_pb2, trajectory_pb2)
        names = [s.full_name for m in modules for s in m.DESCRIPTOR.services_by_name.values()]
        told = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(told, server)
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
        return [*names, ""], told

    async def _wind_down(self) -> None:
        """Waits for the trainer's goodbye, then drains the servers; each wait has a time limit."""
        clock, fleet = self._run.clock, self._fleet
        if self._progress.has_trainer and not self._progress.has_failed:
            # After this time without a call of the trainer the run fails.
            silence_s = self._config.learner.timeout_s + GOODBYE_LIMIT_S
            await await_goodbye(self._run, self._parts.trainer, silence_s=silence_s)
        elif not self._progress.has_failed:
            self._run.events.warn("no trainer is there at the end: nothing is saved or exported")
        self._progress.waits_for("" if self._progress.has_failed else "rollout servers to drain")
        sessions = waiting = list(fleet.sessions.values())
        for session in sessions:
            fleet.order_drain(session, self._progress.cause, finish=False)
        self._parts.intake.withdraw(list(self._book.groups.values()), "the run is over")
        until_s = clock.now_s() + DRAIN_LIMIT_S
        while waiting and clock.now_s() < until_s:
            await self._run.signal.wait(0.1)
            waiting = [s for s in waiting if not s.drained.is_set() and fleet.find(s.key) is s]
        if waiting:
            self._run.events.warn("a rollout server did not drain in time")
        for session in sessions:
            session.disconnect()
