"""The environments of this server: those in its own workers, and those that clients serve.

Consumes: environment orders, episodes that want a session. Produces: sessions, reports on loading.
Waits for: a worker that is ready. Unblocked by: the worker, or the limit of the environment.

Tasks that may end their worker run alone, each episode in a worker of its own. After the end of a
worker fewer episodes share one for a while; further workers take those that would wait, so that a
worker which hangs holds up its own few episodes alone.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import grpc
import grpc.aio
from slipstream.core.backoff import Backoff
from slipstream.core.errors import EnvironmentFailed
from slipstream.rollout_server.episodes.calls import CallTable, OutgoingMessages, StreamSession
from slipstream.rollout_server.episodes.worker_gateway import WorkerGateway
from slipstream.rollout_server.episodes.workers import UNLOADED, EnvironmentWorker, Suspects
from slipstream.v1 import environment_pb2, fleet_pb2, fleet_pb2_grpc, trajectory_pb2

log = logging.getLogger(__name__)
_MAX_RESTARTS_IN_A_ROW = 5
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0
_LONE_PING_S = 1.0
# Most workers of an environment beside `num_workers` that episodes share.
_MAX_FURTHER_WORKERS = 4
# Most workers that take the places of those that a call holds up.
_MAX_HELD_UP_WORKERS = 8
Report = Callable[[fleet_pb2.EnvironmentReport], None]


class HostedEnvironment:
    """One environment and its worker processes; workers that die are started again."""

    def __init__(
        self, gateway: WorkerGateway, order: fleet_pb2.EnvironmentOrder, report: Report
    ) -> None:
        self.spec = order.spec
        self._try_reset = order.try_reset
        self._gateway = gateway
        self._report = report
        self._num_workers = max(self.spec.num_workers, 1)
        self._suspects = Suspects()
        # Numbers of the workers of one episode each that may be started.
        num_lone = max(self._num_workers, gateway.limits.lone_workers)
        self._lone_indices = list(range(self._num_workers, self._num_workers + num_lone))
        # Numbers of the further workers that may be started, and whether one is.
        first_further = self._num_workers + num_lone
        self._most_further = min(num_lone, _MAX_FURTHER_WORKERS)
        num_further = self._most_further + _MAX_HELD_UP_WORKERS
        self._further_indices = list(range(first_further, first_further + num_further))
        # How many of them run or start.
        self._num_further = 0
        self._is_starting_further = False
        # Tasks of which an episode has such a worker.
        self._in_lone_workers: set[int] = set()
        # Episodes that wait for one, by task: the next task first, its newest episode last.
        self._alone: dict[int, list[str]] = {}
        self._group: asyncio.TaskGroup
        self._is_unloaded = False
        self._ready: list[EnvironmentWorker] = []
        # Set at each end of an episode, a worker or a wait for one, and when a worker is ready.
        self._changed = asyncio.Event()
        # The first of the episodes that want a place looks for one; the others wait in order.
        self._first = asyncio.Lock()
        # Workers that are not started again.
        self._num_abandoned = 0
        self._last_failure: EnvironmentFailed | None = None
        # The last report on loading.
        self.outcome: fleet_pb2.EnvironmentReport | None = None

    async def run(self) -> None:
        """Runs the workers and restarts dead workers, until this call is cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for index in range(self._num_workers):
                self._group.create_task(self._keep(index))
            try:
                await asyncio.Event().wait()
            finally:
                # The group takes no task from here on.
                self._is_unloaded = True
                self._changed.set()

    async def open(self, episode_key: str, task_index: int, timeout_s: float) -> StreamSession:
        """Opens a session on the worker with the fewest sessions.

        A task that may end its worker (see `Suspects`) gets a worker of its own. `timeout_s` limits
        each call of the session, not the wait for a worker to start or for a place in one. Raises
        EnvironmentFailed when no worker starts, the environment is unloaded, or the task is set
        aside.
        """
        while True:
            index = await self._lone_index(episode_key, task_index)
            if index is not None:
                return await self._open_alone(index, episode_key, task_index, timeout_s)
            session = await self._open_shared(episode_key, task_index, timeout_s)
            if session is not None:
                return session

    async def _open_shared(
        self, episode_key: str, task_index: int, timeout_s: float
    ) -> StreamSession | None:
        """Waits for a place in a shared worker; returns None once the task must run alone."""
        async with self._first:
            while not self._suspects.runs_alone(task_index):
                self._check_open(task_index)
                takers = [worker for worker in self._ready if worker.takes_episodes]
                worker = min(takers, key=lambda taker: len(taker.episodes), default=None)
                if worker is not None and len(worker.episodes) < self._suspects.most_together:
                    return worker.open(episode_key, task_index, timeout_s, closed=self._changed.set)
                if self._num_abandoned >= self._num_workers:
                    assert self._last_failure is not None
                    raise self._last_failure
                self._start_further_worker()
                self._changed.clear()
                await self._changed.wait()
        return None

    async def _open_alone(
        self, index: int, episode_key: str, task_index: int, timeout_s: float
    ) -> StreamSession:
        """Starts worker `index` for this session alone, and ends it with the session."""
        worker = self._make()
        loaded = asyncio.Event()
        # The worker ends with its episode; an answer only tells the line where that waits.
        worker.ping_s = _LONE_PING_S
        running = self._group.create_task(worker.run(index, lambda _: loaded.set()))
        running.add_done_callback(lambda _: self._lone_ended(index, task_index))
        loading = asyncio.ensure_future(loaded.wait())
        try:
            await asyncio.wait((running, loading), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                raise EnvironmentFailed(*UNLOADED) if running.cancelled() else running.result()
        except BaseException:
            running.cancel()
            raise
        finally:
            loading.cancel()
        return worker.open(episode_key, task_index, timeout_s, closed=running.cancel)

    async def _lone_index(self, episode_key: str, task_index: int) -> int | None:
        """Waits for the number of a worker of its own; returns None once the task is no suspect.

        Suspects take turns, task by task, each with one such worker at a time. The newest episode
        of a task goes first, so that one has had all its attempts, and few workers end, before the
        next one begins.
        """
        if not self._suspects.runs_alone(task_index):
            return None
        self._alone.setdefault(task_index, []).append(episode_key)
        try:
            while self._suspects.runs_alone(task_index):
                self._check_open(task_index)
                turns = (task for task in self._alone if task not in self._in_lone_workers)
                is_its_turn = next(turns, None) == task_index
                is_newest = self._alone[task_index][-1] == episode_key
                if self._lone_indices and is_its_turn and is_newest:
                    self._in_lone_workers.add(task_index)
                    return self._lone_indices.pop()
                self._changed.clear()
                await self._changed.wait()
            return None
        finally:
            waiting = self._alone.pop(task_index)
            waiting.remove(episode_key)
            if waiting:
                self._alone[task_index] = waiting
            self._changed.set()

    def _lone_ended(self, index: int, task_index: int) -> None:
        self._lone_indices.append(index)
        self._in_lone_workers.discard(task_index)
        self._changed.set()

    def _check_open(self, task_index: int) -> None:
        if self._is_unloaded:
            raise EnvironmentFailed(*UNLOADED)
        if why := self._suspects.refusal(task_index, now_s=time.monotonic()):
            raise EnvironmentFailed(trajectory_pb2.FAILURE_KIND_ENVIRONMENT, why)

    def _make(self, *, try_reset: bool = False) -> EnvironmentWorker:
        return EnvironmentWorker(
            self._gateway,
            self.spec,
            self._suspects,
            try_reset=try_reset,
            is_warm=self._has_loaded,
        )

    @property
    def _has_loaded(self) -> bool:
        return self.outcome is not None and not self.outcome.HasField("failure")

    async def _keep(self, index: int) -> None:
        """Runs one worker after another, until they have failed too often."""
        failures = 0
        backoff = Backoff(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
        while True:
            worker = self._make(try_reset=self._try_reset and self.outcome is None)
            try:
                self._last_failure = await worker.run(index, partial(self._loaded, worker))
            finally:
                was_ready = worker in self._ready
                if was_ready:
                    self._ready.remove(worker)
                self._changed.set()
            log.warning("environment %s, worker %d: %s", self.spec.name, index, self._last_failure)
            if was_ready:
                failures = 0
                backoff.reset()
            failures += 1
            # One kill, as by a kernel whose memory is full, may be over; a second one is a cause.
            is_final = not self._has_loaded and (failures > 1 or not worker.was_killed)
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

    def _start_further_worker(self) -> None:
        """Starts another worker that episodes share, one at a time, if any is left to start.

        A worker that a call holds up has another one in its place.
        """
        num_held_up = sum(worker.is_held_up for worker in self._ready)
        if self._num_further - num_held_up >= self._most_further or not self._further_indices:
            return
        if self._has_loaded and not self._is_starting_further:
            self._is_starting_further = True
            self._num_further += 1
            self._group.create_task(self._run_further_worker(self._further_indices.pop()))

    async def _run_further_worker(self, index: int) -> None:
        """Runs a further worker until its end; one that does not load has no successor."""
        worker = self._make()

        def loaded(answer: environment_pb2.Loaded) -> None:
            self._is_starting_further = False
            self._loaded(worker, answer)

        try:
            cause = await worker.run(index, loaded)
        finally:
            if worker in self._ready:
                self._ready.remove(worker)
                self._further_indices.append(index)
                self._num_further -= 1
            self._is_starting_further = False
            self._changed.set()
        log.warning("environment %s, worker %d: %s", self.spec.name, index, cause)

    def _loaded(self, worker: EnvironmentWorker, found: environment_pb2.Loaded) -> None:
        self._ready.append(worker)
        self._changed.set()
        self._publish(fleet_pb2.EnvironmentReport(num_tasks=found.num_tasks, digest=found.digest))

    def _publish(self, outcome: fleet_pb2.EnvironmentReport) -> None:
        outcome.environment = self.spec.name
        if outcome != self.outcome:
            self.outcome = outcome
            self._report(outcome)


class ClientEnvironments:
    """The environments that clients serve; one stream through the controller carries all calls."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self._stub = fleet_pb2_grpc.FleetServiceStub(channel)
        self._metadata = metadata
        self._calls = OutgoingMessages[fleet_pb2.EnvironmentCall]()
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
            stream = self._stub.CallEnvironments(self._calls.messages(), metadata=self._metadata)
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
            self._calls.end()
            self._calls = OutgoingMessages()
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                # A stream that fails while it is cancelled swallows the cancellation.
                return


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
        self._group = group
        self._gateway = gateway
        self._clients = clients
        self._report = report
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
        entry = self._hosted.get(spec.name)
        if entry is not None and (order.unload or entry[0].spec != spec):
            entry[1].cancel()
            del self._hosted[spec.name]
            entry = None
        if order.unload or not spec.reference:
            return
        if entry is not None:
            if (outcome := entry[0].outcome) is not None:
                self._report(outcome)
            return
        hosted = HostedEnvironment(self._gateway, order, self._report)
        self._hosted[spec.name] = (hosted, self._group.create_task(hosted.run()))

    async def open(
        self, environment: str, episode_key: str, task_index: int, timeout_s: float
    ) -> StreamSession:
        """Opens a session for one episode. Raises EnvironmentFailed if none can be opened."""
        hosted = self._hosted.get(environment)
        if hosted is None:
            return self._clients.open(environment, episode_key, timeout_s)
        return await hosted[0].open(episode_key, task_index, timeout_s)
