"""Answers requests of people and programs about the run and the health of its services."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import ModuleType

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from slipstream.core.run_folder import JOURNAL, JOURNAL_LOG
from slipstream.core.types import ServerId
from slipstream.learner.controller.leasing.books import Books
from slipstream.learner.controller.leasing.scheduler import Scheduler
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.session import CallContext, describe
from slipstream.protocol.rich_errors import Reason, abort
from slipstream.protocol.setup import describe_setup
from slipstream.v1 import status_pb2 as pb
from slipstream.v1 import status_pb2_grpc


class StatusServicer(status_pb2_grpc.StatusServiceServicer):
    """Reports the state of the run; only `StopRun` and `DrainServer` change it."""

    def __init__(
        self,
        run: Run,
        books: Books,
        scheduler: Scheduler,
        *,
        newest_metrics: Callable[[], dict[str, float]],
    ) -> None:
        self._run, self._progress = run, run.progress
        self._book, self._environments = books.leases, books.environments
        self._fleet, self._ledger, self._state = books.fleet, books.ledger, books.state
        self._scheduler, self._newest_metrics = scheduler, newest_metrics
        mark = f"{run.config.run.name}/{JOURNAL}/{JOURNAL_LOG}"
        self._setup = describe_setup(run.config, run_id=self._progress.run_id, mark=mark)

    async def GetStatus(self, request: pb.GetStatusRequest, context: CallContext) -> pb.RunStatus:  # noqa: N802
        """Returns the present status of the whole run."""
        return self.status()

    def status(self) -> pb.RunStatus:
        """Returns the present status of the whole run."""
        progress = self._progress
        training = self._book.training_groups()
        leased = self._book.groups_by_holder()
        servers = []
        for session in self._fleet.sessions.values():
            servers.append(describe(session))
            servers[-1].leased_groups = leased.get(session.key, 0)
        return pb.RunStatus(
            run_id=progress.run_id,
            state=pb.RunState.Name(progress.state),
            cause=progress.cause,
            step=progress.version.step,
            num_steps=self._run.config.run.steps,
            max_staleness=self._run.config.algorithm.max_staleness,
            waiting_for=progress.waiting_for,
            servers=[*servers, *self._fleet.departed.values()],
            environments=[entry.describe() for entry in self._environments.entries.values()],
            ledger=self._ledger.snapshot(),
            leased_groups=len(training),
            complete_groups=sum(group.is_complete for group in training),
            queued_bytes=self._fleet.queued_bytes,
            uptime_s=time.monotonic() - progress.started_s,
            metrics=self._newest_metrics(),
            lease_wait="" if progress.is_over else self._scheduler.lease_wait,
            reserved_bytes=self._scheduler.reserved_bytes,
            checkpoint_step=self._state.checkpoint.step,
        )

    async def GetSetup(self, request: pb.GetSetupRequest, context: CallContext) -> pb.Setup:  # noqa: N802
        """Returns the setup, which a trainer or server compares with its own before loading."""
        setup = pb.Setup(unix_time_s=time.time())
        setup.MergeFrom(self._setup)
        return setup

    async def Watch(  # noqa: N802
        self, request: pb.WatchRequest, context: CallContext
    ) -> AsyncIterator[pb.Event]:
        """Yields events as they are added, up to the run's last event."""
        async for event in self._run.events.follow(request.after):
            yield event

    async def StopRun(self, request: pb.StopRunRequest, context: CallContext) -> pb.StopRunResponse:  # noqa: N802
        """Stops the run cleanly; with `request.failed` the run ends as failed instead."""
        if request.failed:
            self._progress.fail(request.reason)
        else:
            self._progress.stop(request.reason or "a client asked for it")
        return pb.StopRunResponse()

    async def DrainServer(  # noqa: N802
        self, request: pb.DrainServerRequest, context: CallContext
    ) -> pb.DrainServerResponse:
        """Tells one rollout server to leave, after its episodes have ended or are handed back."""
        session = self._fleet.sessions.get(ServerId(request.server_id))
        if session is None:
            known = ", ".join(sorted(self._fleet.sessions)) or "none"
            text = f"no rollout server {request.server_id} is in the run; there are: {known}"
            code, about = grpc.StatusCode.INVALID_ARGUMENT, {"server_id": request.server_id}
            await abort(context, code, text, Reason.BAD_ARGUMENT, about)
        reason = request.reason or "a client asked for it"
        self._fleet.order_drain(session, reason, finish=True)
        return pb.DrainServerResponse(warning=self._fleet.warn_without(session))


class ServiceHealth:
    """The gRPC health service; all services of the controller have the same health."""

    def __init__(self, server: grpc.aio.Server, modules: Sequence[ModuleType]) -> None:
        """Adds health and reflection to `server`; `modules` define the controller's services."""
        names = [s.full_name for m in modules for s in m.DESCRIPTOR.services_by_name.values()]
        self._names = [*names, ""]
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)

    async def tell(self, *, serving: bool) -> None:
        """Sets the health of all services until the next call."""
        answers = health_pb2.HealthCheckResponse
        status = answers.SERVING if serving else answers.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)
