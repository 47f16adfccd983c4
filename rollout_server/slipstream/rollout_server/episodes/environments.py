"""The environments of this server: those in its own workers, and those that clients serve.

Consumes: environment orders, episodes that want a session. Produces: sessions, reports on loading.
Waits for: a worker that is ready. Unblocked by: the worker, or the limit of the environment.

Tasks that may end their worker run alone in a worker of their own (`LoneWorkers`). After the end of
a worker fewer episodes share one for a while.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from slipstream.core.backoff import Backoff
from slipstream.core.errors import EnvironmentFailed
from slipstream.rollout_server.episodes.calls import CallTable, StreamSession
from slipstream.rollout_server.episodes.worker_gateway import WorkerGateway
from slipstream.rollout_server.episodes.workers import START_S, EnvironmentWorker, Suspects
from slipstream.v1 import environment_pb2, fleet_pb2, fleet_pb2_grpc, trajectory_pb2

log = logging.getLogger(__name__)
_MAX_RESTARTS_IN_A_ROW = 5
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0
_MAX_QUEUED_CALLS = 65_536
Report = Callable[[fleet_pb2.EnvironmentReport], None]


@dataclass(order=True)
class LoneTurn:
    """The turn of one episode that waits for a worker of its own; higher attempts go first.

    In this order the fewest workers end before the task at fault has used up its attempts.
    """

    rank: tuple[int, int]
    worker: asyncio.Future[EnvironmentWorker] = field(compare=False)
    over: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    has_passed: bool = field(default=False, compare=False)

    def end(self, has_passed: bool) -> None:
        """Ends the turn; `has_passed` says that the worker can run another episode."""
        self.has_passed = has_passed
        self.over.set()


class HostedEnvironment:
    """One environment and its worker processes; workers that die are started again."""

    def __init__(
        self, gateway: WorkerGateway, order: fleet_pb2.EnvironmentOrder, report: Report
    ) -> None:
        self.spec = order.spec
        self._try_reset = order.try_reset
        self._gateway, self._report = gateway, report
        self._num_workers = max(self.spec.num_workers, 1)
        self._suspects = Suspects()
        self._alone = LoneWorkers(self._make, self._num_workers)
        self._ready: list[EnvironmentWorker] = []
        # Set at each end of an episode or a worker, and when a worker is ready.
        self._changed = asyncio.Event()
        # The first of the episodes that want a place looks for one; the others wait in order.
        self._first = asyncio.Lock()
        # Workers that are not started again.
        self._num_abandoned = 0
        self._last_failure: EnvironmentFailed | None = None
        self._outcome: fleet_pb2.EnvironmentReport | None = None

    async def run(self) -> None:
        """Runs the workers and restarts dead workers, until this call is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._alone.run())
            for index in range(self._num_workers):
                group.create_task(self._keep(index))

    def report_again(self) -> None:
        """Repeats the report on loading, for a controller that does not know it yet."""
        if self._outcome is not None:
            self._report(self._outcome)

    async def open(
        self, episode_key: str, task_index: int, attempt: int, timeout_s: float
    ) -> StreamSession:
        """Opens a session on the worker with the fewest sessions.

        A task that may end its worker (see `Suspects`) gets a worker of its own. `timeout_s` limits
        each call of the session, not the wait for a worker to start or for a place in one. Raises
        EnvironmentFailed when no worker starts.
        """
        if not self._suspects.runs_alone(task_index):
            async with self._first:
                while not self._suspects.runs_alone(task_index):
                    takers = [worker for worker in self._ready if worker.table.is_open]
                    worker = min(takers, key=lambda w: len(w.episodes), default=None)
                    if worker is not None and len(worker.episodes) < self._suspects.most_together:
                        return worker.open(
                            episode_key, task_index, timeout_s, closed=lambda _: self._changed.set()
                        )
                    if self._num_abandoned >= self._num_workers:
                        assert self._last_failure is not None
                        raise self._last_failure
                    self._changed.clear()
                    await self._changed.wait()
        worker, turn = await self._alone.turn(attempt)
        return worker.open(episode_key, task_index, timeout_s, closed=turn.end)

    def _make(self, *, try_reset: bool = False, start_s: float | None = None) -> EnvironmentWorker:
        return EnvironmentWorker(
            self._gateway, self.spec, self._suspects, try_reset=try_reset, start_s=start_s
        )

    async def _keep(self, index: int) -> None:
        """Runs one worker after another, until they have failed too often."""
        failures, backoff = 0, Backoff(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
        start_s, waited_s = START_S, 0.0
        while True:
            worker = self._make(
                try_reset=self._try_reset and self._outcome is None, start_s=start_s
            )
            was_ready, self._last_failure = await self._run(worker, index)
            log.warning("environment %s, worker %d: %s", self.spec.name, index, self._last_failure)
            if worker.was_late and waited_s + start_s < self._gateway.limits.start_s:
                # A busy machine starts no process in time: the next one has longer.
                waited_s += start_s
                start_s = min(2 * start_s, self._gateway.limits.start_s - waited_s)
                continue
            start_s, waited_s = START_S, 0.0
            if was_ready:
                failures = 0
                backoff.reset()
            failures += 1
            never_loaded = self._outcome is None or self._outcome.HasField("failure")
            # One kill, as by a kernel whose memory is full, may be over; a second one is a cause.
            is_final = never_loaded and (failures > 1 or not worker.was_killed)
            if is_final or failures > _MAX_RESTARTS_IN_A_ROW:
                break
            await asyncio.sleep(backoff.take_s())
        self._num_abandoned += 1
        self._changed.set()
        if self._num_abandoned == self._num_workers:
            cause = trajectory_pb2.Failure(
                kind=trajectory_pb2.FAILURE_KIND_ENVIRONMENT, message=str(self._last_failure)
            )
            self._publish(fleet_pb2.EnvironmentReport(failure=cause))

    async def _run(self, worker: EnvironmentWorker, index: int) -> tuple[bool, EnvironmentFailed]:
        """Runs `worker` to its end; returns whether it loaded, and the cause of the end."""

        def loaded(found: environment_pb2.Loaded) -> None:
            self._ready.append(worker)
            self._changed.set()
            self._publish(
                fleet_pb2.EnvironmentReport(num_tasks=found.num_tasks, digest=found.digest)
            )

        try:
            failure = await worker.run(index, loaded)
            return worker in self._ready, failure
        finally:
            if worker in self._ready:
                self._ready.remove(worker)
            self._changed.set()

    def _publish(self, outcome: fleet_pb2.EnvironmentReport) -> None:
        outcome.environment = self.spec.name
        if outcome != self._outcome:
            self._outcome = outcome
            self._report(outcome)


class ClientEnvironments:
    """The environments that clients serve; one stream through the controller carries all calls."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self._stub = fleet_pb2_grpc.FleetServiceStub(channel)
        self._metadata = metadata
        self._calls: asyncio.Queue[fleet_pb2.EnvironmentCall] = asyncio.Queue(_MAX_QUEUED_CALLS)
        self._tables: dict[str, CallTable] = {}
        self._numbers = itertools.count(1)
        self._wanted = asyncio.Event()

    def open(self, environment: str, episode_key: str, timeout_s: float) -> StreamSession:
        """Opens a session of an episode with the client that serves `environment`."""
        table = self._tables.get(environment)
        if table is None:
            calls = self._calls

            def send(command: environment_pb2.WorkerCommand) -> None:
                call = fleet_pb2.EnvironmentCall(environment=environment, command=command)
                calls.put_nowait(call)

            table = self._tables[environment] = CallTable(send, self._numbers)
        self._wanted.set()
        return StreamSession(table, episode_key, timeout_s)

    async def run(self) -> None:
        """Opens the stream whenever a session needs it, until this call is cancelled.

        The open calls of a broken stream fail.
        """
        while True:
            await self._wanted.wait()
            stream = self._stub.CallEnvironments(self._outgoing(), metadata=self._metadata)
            cause = "the controller ended the stream"
            try:
                async for answer in stream:
                    for table in self._tables.values():
                        table.answered(answer.message)
            except grpc.aio.AioRpcError as error:
                cause = error.details() or error.code().name
            finally:
                stream.cancel()
            self._wanted.clear()
            for table in self._tables.values():
                table.end(
                    trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE,
                    f"calls to clients broke off: {cause}",
                )
            self._tables.clear()
            self._calls = asyncio.Queue(_MAX_QUEUED_CALLS)
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                # A stream that fails while it is cancelled swallows the cancellation.
                return

    async def _outgoing(self) -> AsyncIterator[fleet_pb2.EnvironmentCall]:
        queue = self._calls
        while True:
            yield await queue.get()


class Environments:
    """All environments of this server, by name."""

    def __init__(
        self,
        group: asyncio.TaskGroup,
        gateway: WorkerGateway,
        clients: ClientEnvironments,
        report: Report,
    ) -> None:
        """Starts its tasks in `group`; `report` sends reports on loading to the controller."""
        self._group, self._gateway = group, gateway
        self._clients, self._report = clients, report
        self._hosted: dict[str, tuple[HostedEnvironment, asyncio.Task[None]]] = {}
        self._calling = group.create_task(clients.run())

    def close(self) -> None:
        """Ends all workers and streams; their tasks then end in the task group."""
        self._calling.cancel()
        for _, task in self._hosted.values():
            task.cancel()

    def order(self, order: fleet_pb2.EnvironmentOrder) -> None:
        """Loads or unloads an environment; loads nothing if a client serves the environment.

        If the environment is already loaded with the same spec, only the report on loading is
        repeated.
        """
        spec = order.spec
        known = self._hosted.get(spec.name)
        if known is not None and (order.unload or known[0].spec != spec):
            known[1].cancel()
            del self._hosted[spec.name]
            known = None
        if order.unload or not spec.reference:
            return
        if known is not None:
            known[0].report_again()
            return
        hosted = HostedEnvironment(self._gateway, order, self._report)
        self._hosted[spec.name] = (hosted, self._group.create_task(hosted.run()))

    async def open(
        self, environment: str, episode_key: str, task_index: int, attempt: int, timeout_s: float
    ) -> StreamSession:
        """Opens a session for one episode. Raises EnvironmentFailed if none can be opened."""
        hosted = self._hosted.get(environment)
        if hosted is None:
            return self._clients.open(environment, episode_key, timeout_s)
        return await hosted[0].open(episode_key, task_index, attempt, timeout_s)


class LoneWorkers:
    """Runs workers that serve one episode at a time.

    A worker serves one waiting episode after another. It ends when no episode waits, or after an
    episode that leaves it unfit for another (`LoneTurn.end` with `has_passed` False).
    """

    def __init__(self, make: Callable[[], EnvironmentWorker], count: int) -> None:
        """Takes the function that makes workers; at most `count` of them run at one time.

        Their indices are `count` .. 2 * `count` - 1.
        """
        self._make = make
        self._indices = range(count, 2 * count)
        self._turns: asyncio.PriorityQueue[LoneTurn] = asyncio.PriorityQueue()
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Gives workers to the waiting episodes, until this call is cancelled."""
        async with asyncio.TaskGroup() as group:
            for index in self._indices:
                group.create_task(self._keep(index))

    async def turn(self, attempt: int) -> tuple[EnvironmentWorker, LoneTurn]:
        """Waits for a worker that serves no other episode; returns the worker and the turn.

        The caller must end the turn. Turns with a higher `attempt` go first. Raises
        EnvironmentFailed if the worker cannot load the environment.
        """
        worker = asyncio.get_running_loop().create_future()
        turn = LoneTurn((-attempt, next(self._numbers)), worker)
        self._turns.put_nowait(turn)
        try:
            return await worker, turn
        except asyncio.CancelledError:
            # The turn may have been given a worker at this very moment.
            turn.over.set()
            raise

    async def _keep(self, index: int) -> None:
        while True:
            first = await self._turns.get()
            if first.worker.cancelled():
                continue
            worker, loaded = self._make(), asyncio.Event()
            async with asyncio.TaskGroup() as group:
                running = group.create_task(worker.run(index, lambda _: loaded.set()))  # noqa: B023
                serving = group.create_task(self._serve(worker, loaded, first))
                await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
                serving.cancel()
                if running.done() and not first.worker.done():
                    first.worker.set_exception(running.result())
                running.cancel()

    async def _serve(
        self, worker: EnvironmentWorker, loaded: asyncio.Event, first: LoneTurn
    ) -> None:
        """Gives the worker to one episode after another, until one fails or no episode waits."""
        await loaded.wait()
        turn = first
        while True:
            if not turn.worker.cancelled():
                turn.worker.set_result(worker)
                await turn.over.wait()
                if not turn.has_passed:
                    return
            if self._turns.empty():
                return
            turn = self._turns.get_nowait()
