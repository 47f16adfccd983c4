"""Starts, restarts and ends the processes of one command, and shows the run's progress.

Consumes: events of the controller, ends of processes. Produces: progress on the screen, restarts of
processes. Waits for: the final end of the controller. Unblocked by: the end of the run, or of a
process that the run needs.
"""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Self

import grpc.aio
from slipstream.client.launch.children import (
    SAME_ORDER_S,
    Child,
    RestartPolicy,
    first_failed,
    rank_environments,
    start_in_run,
    stop_signal,
    with_full_disk,
)
from slipstream.client.launch.display import Display, loading_line, wait_line
from slipstream.client.launch.placement import (
    CONTROLLER,
    SERVER,
    TRAINER,
    Placement,
    describe_sharing,
)
from slipstream.client.run_folder import (
    former_settings,
    identity_overrides,
    node_folder,
    read_summary,
    write_config,
)
from slipstream.client.status import run_from_pb
from slipstream.core.configuration.automatic import describe_choices, describe_plan
from slipstream.core.configuration.config_file import model_warnings
from slipstream.core.errors import DONE, FAILED, RUN_STOPPED, ConfigError, RunFailed
from slipstream.core.extension import Program
from slipstream.core.machine.files import remove_abandoned
from slipstream.core.patience import Patience
from slipstream.core.run_folder import LOGS
from slipstream.core.settings.config import Config
from slipstream.core.waits import within
from slipstream.protocol.access.security import Credentials, call_metadata, cause_of, open_channel
from slipstream.v1 import status_pb2, status_pb2_grpc

STARTING = status_pb2.RUN_STATE_STARTING
# Statuses of a call that found no controller, or one that stands still.
SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# Seconds without a line before one says why the run waits; doubled for each next line, to a limit.
FIRST_S = 20.0
LIMIT_S = 300.0
# A controller that does not answer a stop for so many seconds is ended.
STOP_LIMIT_S = 30.0
ANSWER_LIMIT_S = 5.0
# Seconds between two questions to the controller, such as whether the trainer has loaded.
LOOK_S = 2.0
# Seconds between two questions to a controller that answers, whether it still does.
ALIVE_PERIOD_S = 10.0
# Seconds without an answer after which a controller that had answered is ended and started again.
SILENT_LIMIT_S = 60.0
GRACE_S = 30.0
# Seconds of grace after a second signal: the next start resumes from the disk.
HURRIED_GRACE_S = 1.0
# Seconds that the last events may need to arrive after the controller has ended.
EVENTS_LIMIT_S = 5.0
# Seconds that the other processes may need to end after the controller has ended.
LEAVE_LIMIT_S = 60.0
# Seconds between two starts of a controller; servers and trainer wait for it.
CONTROLLER_PAUSE_S = 0.1
# A server or controller that ran for so many seconds has as many restarts as a new one.
FORGIVEN_S = 600.0


class RunCalls:
    """Calls the controller at `address`; only `status` raises an error if no controller answers."""

    def __init__(self, address: str, credentials: Credentials, run_id: str | None = None) -> None:
        self._address = address
        self._credentials = credentials
        self.metadata = call_metadata(credentials, run_id)

    def channel(self) -> grpc.aio.Channel:
        """Opens a new connection, which the caller closes."""
        return open_channel(self._address, self._credentials)

    async def stop(self, reason: str, *, failed: bool) -> str:
        """Asks for the run's end for up to 30 s; returns "", or the status of a failed call."""
        request = status_pb2.StopRunRequest(reason=reason, failed=failed)
        try:
            async with self.channel() as channel:
                await status_pb2_grpc.StatusServiceStub(channel).StopRun(
                    request, metadata=self.metadata, timeout=STOP_LIMIT_S, wait_for_ready=True
                )
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return ""

    async def status(self) -> status_pb2.RunStatus:
        """Returns the state of the run; raises AioRpcError if the controller does not answer."""
        async with self.channel() as channel:
            status: status_pb2.RunStatus
            status = await status_pb2_grpc.StatusServiceStub(channel).GetStatus(
                status_pb2.GetStatusRequest(), metadata=self.metadata, timeout=ANSWER_LIMIT_S
            )
            return status

    async def look(self) -> status_pb2.RunStatus | None:
        """Returns the state of the run, or None if the controller does not answer."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            return await self.status()
        return None

    async def answers(self) -> bool:
        """Whether the controller answers at all; a refusal is an answer too."""
        try:
            await self.status()
        except grpc.aio.AioRpcError as error:
            return error.code() not in SILENCE
        return True

    async def until_silent(self, has_spoken: Callable[[], bool]) -> None:
        """Returns when a controller has spoken or answered, and then not for `SILENT_LIMIT_S`.

        A controller that reads a long journal has done neither yet. Seconds in which this process
        stood still, as on a machine that slept, do not count.
        """
        while not has_spoken() and not await self.answers():
            await asyncio.sleep(LOOK_S)
        patience = Patience(SILENT_LIMIT_S)
        while not patience.is_over:
            patience.begin(ANSWER_LIMIT_S + LOOK_S)
            if await self.answers():
                await asyncio.sleep(ALIVE_PERIOD_S)
                patience = Patience(SILENT_LIMIT_S)
            else:
                await asyncio.sleep(LOOK_S)


async def end_in_order(ends: asyncio.Future[Child | None], calls: RunCalls) -> None:
    """Asks the controller to stop the run, and waits for `ends`, the end of this node's ranks.

    Stops waiting when the controller has not reported for `GRACE_S` that it is stopping. A
    scheduler may stop all nodes or only this one; in both cases rank 0 lets all ranks save and
    export.
    """
    stop = asyncio.ensure_future(calls.stop("a node of the learner leaves", failed=False))
    looks = 0
    while not ends.done() and looks < GRACE_S / LOOK_S:
        # While it stops, the trainer saves and exports.
        run = await calls.look()
        is_stopping = run is not None and run.state == status_pb2.RUN_STATE_STOPPING
        looks = 0 if is_stopping else looks + 1
        await asyncio.wait((ends,), timeout=LOOK_S)
    stop.cancel()
    await asyncio.gather(stop, return_exceptions=True)


async def tell_waits(display: Display, calls: RunCalls, most_tokens: int) -> None:
    """Says why the run waits after `FIRST_S` without a line, then after twice as long.

    A reply may have `most_tokens`.
    """
    patience_s = FIRST_S
    last_line_s = 0.0
    while True:
        if display.spoke_s != last_line_s:
            patience_s = FIRST_S
        if display.quiet_s < patience_s:
            last_line_s = display.spoke_s
            await asyncio.sleep(patience_s - display.quiet_s)
            continue
        try:
            display.tell(wait_line(run_from_pb(await calls.status()), most_tokens))
        except grpc.aio.AioRpcError as error:
            cause = cause_of(error.code(), error.details())
            display.warn(f"the controller gives no answer: {cause}")
        last_line_s = display.spoke_s
        patience_s = min(2 * patience_s, LIMIT_S)


class RunProcesses:
    """Starts and restarts the processes of one command; leaving `async with` ends them."""

    def __init__(
        self,
        config: Config,
        credentials: Credentials,
        placement: Placement,
        *,
        node_rank: int = 0,
        stated: Config | None = None,
    ) -> None:
        """Writes `stated`, which lacks the run's id and its free port, or else `config`."""
        self._config = config
        self._placement = placement
        self._calls = RunCalls(config.controller.address, credentials, config.run.id)
        self._logs = config.run_dir / LOGS
        folder = node_folder(config, node_rank)
        self._former_settings = former_settings(folder)
        settings = write_config(stated or config, folder)
        self._config_arguments = ["--config", str(settings)]
        if stated is not None:
            self._config_arguments += identity_overrides(config)
        self._children: list[Child] = []
        self._controller: asyncio.Task[Child] | None = None
        # The ranks of this node, and their processes.
        self._own_ranks = range(0)
        self._ranks: list[Child] = []
        self._servers: dict[str, asyncio.Task[None]] = {}
        self._display = Display(config)
        # Shows a warning on the screen.
        self.warn = self._display.warn
        self._over = False
        # Whether any controller of this command has told an event.
        self._has_begun = False
        # How a trainer rank was killed; the other ranks only say that they lost it.
        self._killed = ""
        # The failure that this command reported to the controller, or "" without a failure.
        self._failure = ""
        # Whether this command ended the controller because it did not answer.
        self._ended_controller = False

    async def __aenter__(self) -> Self:
        # Before the first process starts: a signal could end this one and leave the others.
        self._stopping = asyncio.create_task(stop_signal())
        await asyncio.sleep(0)
        # An earlier command may have been killed, which then removed nothing.
        await asyncio.to_thread(remove_abandoned)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over = True
        grace_s = GRACE_S
        if kind is asyncio.CancelledError:
            grace_s = HURRIED_GRACE_S
            self._display.warn(f"the run is ended at once{self._display.resuming()}")
        elif kind is not None:
            self._tell_running()
        self._stopping.cancel()
        for task in self._servers.values():
            task.cancel()
        await asyncio.gather(*self._servers.values(), return_exceptions=True)
        await asyncio.gather(*(child.stop(grace_s) for child in self._ranks))
        await asyncio.gather(*(child.stop(grace_s) for child in self._children))
        is_refused = kind is not None and issubclass(kind, ConfigError)
        if is_refused and not self._has_begun:
            self._former_settings.restore()
        # Killed processes leave their sockets, and those of their engines.
        await asyncio.to_thread(remove_abandoned)

    def start_controller(self, *, num_servers: int) -> None:
        """Starts the controller and shows the run's first lines, with the number of servers."""
        address = self._config.controller.address
        self._display.tell(f"the run starts at {address}; its logs are in {self._logs}/")
        self._display.tell(loading_line(self._config, num_servers))
        if self._config.automatic:
            choices = describe_choices(self._config)
            self._display.tell(f"chosen for {self._config.model.path}: {choices}")
        for line in describe_plan(self._config):
            self._display.tell(line)
        for line in describe_sharing(self._config, self._placement):
            self._display.tell(line)
        for line in model_warnings(self._config):
            self._display.warn(line)
        self._controller = asyncio.ensure_future(self._start_controller())

    def keep_trainers(self, ranks: range) -> None:
        """Makes `wait` start the trainer ranks of this node, and restart them when they die."""
        self._own_ranks = ranks
        learner = self._config.learner
        if len(ranks) < learner.world_size:
            self._display.tell(
                f"ranks {ranks[0]} to {ranks[-1]} of {learner.world_size} meet "
                f"the others at {learner.master}, within {learner.timeout_s:g} s"
            )

    def keep_rollout_server(self, number: int) -> None:
        """Starts rollout server `number`, and restarts it when it dies."""
        name = f"{SERVER.name}-{number}"
        address = self._config.controller.address
        episodes = self._placement.max_episodes(self._config, number)
        memory = self._placement.memory[number : number + 1]
        arguments = [f"rollout_server.gpu_memory_utilization={share}" for share in memory]
        arguments += [f"rollout_server.max_episodes={episodes}", "--controller", address]
        arguments += ["--server-id", name]
        environ = self._placement.server_environment(number)
        keeping = self._keep(SERVER, name, arguments, environ)
        self._servers[name] = asyncio.ensure_future(self._told(f"rollout server {name}", keeping))

    def keep_beside(self, program: Program, arguments: Sequence[str]) -> None:
        """Starts a program that only calls the controller, and restarts it when it dies."""
        keeping = self._keep(program, program.name, arguments)
        self._servers[program.name] = asyncio.ensure_future(self._told(program.name, keeping))

    async def wait(self) -> int:
        """Shows progress until the run is over; raises RunFailed with the cause if it failed.

        Returns 0 when the run is done, 128 plus the signal's number when a signal ended it earlier,
        and 1 when the run failed with a cause that was already shown.
        """
        if self._controller is None:
            return await self._wait_for_ranks()
        keep_trainers = asyncio.ensure_future(self._told("the trainer", self._watch_trainers()))
        forward_stop = asyncio.ensure_future(self._forward_stop())
        waits = asyncio.ensure_future(
            tell_waits(self._display, self._calls, self._config.sampling.max_reply_tokens)
        )
        tasks = (keep_trainers, forward_stop, waits)
        try:
            controller = await self._keep_controller()
            # Without a controller no rank is restarted, however the ranks end.
            keep_trainers.cancel()
            waits.cancel()
            if self._display.is_over:
                running = self._tell_running()
                for child in running:
                    # A server that had not joined yet would look for the controller.
                    child.signal(signal.SIGTERM)
                leaving = asyncio.gather(*(child.process.wait() for child in running))
                await within(LEAVE_LIMIT_S, leaving)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._ended_controller and self._failure:
            raise RunFailed(with_full_disk(self._failure, self._logs))
        if controller.process.returncode == 0:
            return self._signalled if self._display.summary() else 0
        if self._ended_controller or await self._shares_order(controller):
            return self._signalled
        # A controller whose disk is full may have reported the cause, but not the end.
        failure = self._display.failure or self._display.told_failure
        if failure:
            if self._display.failure:
                self._display.summary()
            cause = self._killed or failure
            if cause == self._display.told_failure:
                return FAILED
            raise RunFailed(with_full_disk(cause, self._logs))
        raise controller.failure()

    async def _wait_for_ranks(self) -> int:
        """Waits on a further node of the learner, where ranks alone run; otherwise as `wait`."""
        ends = asyncio.ensure_future(self.keep_ranks())
        await asyncio.wait((self._stopping, ends), return_when=asyncio.FIRST_COMPLETED)
        if not ends.done():
            await end_in_order(ends, self._calls)
        self._stopping.cancel()
        ends.cancel()
        await asyncio.gather(ends, return_exceptions=True)
        await asyncio.gather(*(child.stop(HURRIED_GRACE_S) for child in self._ranks))
        ended = [child for child in self._ranks if child.process.returncode]
        failed = [child for child in ended if not await self._shares_order(child)]
        if failed:
            raise RunFailed(failed[0].describe_end())
        return self._signalled

    @property
    def _signalled(self) -> int:
        has_come = self._stopping.done() and not self._stopping.cancelled()
        return 128 + self._stopping.result() if has_come else 0

    async def _shares_order(self, ended: Child) -> bool:
        """Whether a program was ended by the SIGTERM that this command got too.

        A scheduler sends it to all processes of a job, some of which cannot handle it yet.
        """
        if ended.process.returncode != -signal.SIGTERM:
            return False
        await asyncio.wait((self._stopping,), timeout=SAME_ORDER_S)
        return self._signalled > 0

    def _tell_running(self) -> list[Child]:
        children = (*self._children, *self._ranks)
        running = [child for child in children if child.name != "controller" and child.is_running]
        if running:
            names = ", ".join(child.name for child in running)
            self._display.tell(f"the run is over; still to end: {names}")
        return running

    async def _start_controller(self) -> Child:
        name = CONTROLLER.name
        child = await start_in_run(self._config, name, CONTROLLER.module, self._config_arguments)
        self._children.append(child)
        return child

    async def _told(self, name: str, keeping: Awaitable[None]) -> None:
        """Awaits `keeping`; an OSError, such as from a full disk, ends the run as failed.

        The task of this call is awaited only at the end of the run. An error raised here would
        appear only then, and the run would wait for a process that never starts.
        """
        try:
            await keeping
        except OSError as error:
            await self._stop_run(f"{name} cannot be started: {error.strerror}", failed=True)

    async def _keep_controller(self) -> Child:
        """Shows the controller's events, and restarts it when it dies; returns the last controller.

        Servers and trainer reconnect to the new controller and keep their state. While the run
        stops, the controller is not restarted: a new one would not know of the stop, and the
        trainer leaves.
        """
        policy = RestartPolicy(CONTROLLER.restarts, first_pause_s=CONTROLLER_PAUSE_S)
        while True:
            assert self._controller is not None
            controller = await self._controller
            show = asyncio.ensure_future(self._watch_events(controller))
            end = asyncio.ensure_future(self._end_if_silent(controller))
            try:
                await controller.process.wait()
                if not self._ended_controller:
                    # Events that it sent before its end may still arrive; then the call breaks off.
                    await within(EVENTS_LIMIT_S, show)
            finally:
                show.cancel()
                end.cancel()
                await asyncio.gather(show, end, return_exceptions=True)
            code = controller.process.returncode
            await self._shares_order(controller)
            is_ending = self._ended_controller or self._failure or self._signalled
            is_told = self._display.is_over or bool(self._display.told_failure)
            # A run that failed before anybody listened has told its end in a file.
            is_told |= code == FAILED and read_summary(self._config.run_dir) is not None
            if code == 0 or is_ending or is_told or self._display.is_stopping:
                return controller
            if not await self._may_restart(policy, controller):
                return controller
            controller.signal(signal.SIGKILL)
            self._children.remove(controller)
            self._controller = asyncio.ensure_future(self._start_controller())

    async def _end_if_silent(self, controller: Child) -> None:
        """Ends a controller that stands still: the next one goes on from the journal."""
        await self._calls.until_silent(lambda: self._display.last_event > 0)
        if self._display.is_over:
            return
        silent = f"the controller has given no answer for {SILENT_LIMIT_S:g} s"
        if self._display.is_stopping:
            # A new controller would not know of the stop.
            self._failure = self._failure or f"{silent} while the run was stopped"
            self._ended_controller = True
        self._display.warn(f"{silent}: it is ended")
        controller.signal(signal.SIGKILL)

    async def _keep(
        self, program: Program, name: str, arguments: Sequence[str], environ: Mapping[str, str] = {}
    ) -> None:
        is_server = program is SERVER
        policy = RestartPolicy(program.restarts)
        # If both use the whole GPU in turns, the learner must have loaded and freed it.
        waits = self._config.controller.turns == "sleep" and is_server
        while waits and ((run := await self._calls.look()) is None or run.state == STARTING):
            await asyncio.sleep(LOOK_S)
        while True:
            argv = [*self._config_arguments, *arguments]
            child = await start_in_run(self._config, name, program.module, argv, environ)
            self._children.append(child)
            await child.process.wait()
            # Processes that it has started must not outlive it. Others may have its number later.
            child.signal(signal.SIGKILL)
            self._children.remove(child)
            has_left = is_server and child.process.returncode in (DONE, RUN_STOPPED)
            if self._over or self._display.is_over or has_left:
                return
            if await self._shares_order(child):
                return
            if not await self._may_restart(policy, child):
                if self._placement.is_extended and name == f"{SERVER.name}-1":
                    # The second server was not asked for.
                    self.warn(f"{child.describe_end()}; the run goes on without it")
                    return
                await self._stop_run(child.describe_end(), failed=True)
                return
            servers = [server for server in self._children if server.name.startswith(SERVER.name)]
            if is_server and not any(server.is_running for server in servers):
                self._display.tell(f"no rollout server is left here: {name} loads its engine again")

    async def _may_restart(self, policy: RestartPolicy, ended: Child) -> bool:
        """Waits before a process starts again; returns False if it must not start again."""
        if ended.age_s > FORGIVEN_S:
            policy.forgive()
        pause_s = policy.pause_after(ended.process.returncode, age_s=ended.age_s)
        if pause_s is None:
            return False
        self._display.warn(f"{ended.describe_end()}; start {policy.restarts + 1}")
        await asyncio.sleep(pause_s)
        return True

    async def keep_ranks(self) -> Child | None:
        """Keeps ranks up; returns None when all ended in order, or the one whose death is final.

        When one dies, all start again from the last checkpoint. They may die `TRAINER.restarts`
        times before a new version or checkpoint: ranks that train the same steps again after each
        death reach neither, however long they run.
        """
        policy = RestartPolicy(TRAINER.restarts)
        newest = (0, 0)
        while True:
            await self.start_ranks()
            failed = await first_failed(self._ranks, fine=(0,))
            if failed is None:
                return None
            for child in self._ranks:
                # The other ranks wait for the dead one, and resume from the disk.
                child.signal(signal.SIGKILL)
            await asyncio.gather(*(child.process.wait() for child in self._ranks))
            if await self._shares_order(failed):
                return None
            run = await self._calls.look()
            if run is not None and (run.step > newest[0] or run.checkpoint_step > newest[1]):
                policy.forgive()
                newest = run.step, run.checkpoint_step
            pause_s = policy.pause_after(failed.process.returncode, age_s=failed.age_s)
            if pause_s is None:
                return failed
            again = f"the trainer starts again, start {policy.restarts + 1}"
            self.warn(f"{failed.describe_end()}; {again}")
            await asyncio.sleep(pause_s)

    async def start_ranks(self) -> None:
        """Starts all ranks of the node, with the variables that torchrun would set."""
        self._ranks.clear()
        for torchrun in rank_environments(self._config, self._own_ranks):
            environ = torchrun | self._placement.learner_environment
            name = f"{TRAINER.name}-{environ['RANK']}"
            argv = self._config_arguments
            child = await start_in_run(self._config, name, TRAINER.module, argv, environ)
            self._ranks.append(child)

    async def _watch_trainers(self) -> None:
        if not self._own_ranks:
            return
        while (failed := await self.keep_ranks()) is None:
            if self._signalled:
                return
            # The ranks left normally, perhaps for a controller that died before the run was over.
            while (run := await self._calls.look()) is None or run.state != STARTING:
                await asyncio.sleep(LOOK_S)
            text = "the trainer had left before its controller died"
            if len(self._own_ranks) < self._config.learner.world_size:
                await self._stop_run(text, failed=True)
                return
            self._display.warn(f"{text}; it starts again")
        if not self._over:
            if failed.was_killed:
                self._killed = failed.describe_end()
            await self._stop_run(failed.describe_end(), failed=True)

    async def _forward_stop(self) -> None:
        number = await self._stopping
        self._display.warn(f"{number.name}: the run is stopped in order; a second ends it at once")
        await self._stop_run(f"the user sent {number.name}", failed=False)

    async def _stop_run(self, reason: str, *, failed: bool) -> None:
        """Asks the controller to end the run; ends the controller itself if it does not answer."""
        if failed:
            self._failure = self._failure or reason
        controller = await self._controller if self._controller is not None else None
        if controller is not None:
            # Somebody may have stopped the process by SIGSTOP: it could neither answer nor end.
            controller.signal(signal.SIGCONT)
        problem = await self._calls.stop(reason, failed=failed)
        if not problem:
            return
        if controller is None or not controller.is_running or self._display.is_over:
            return
        if self._ended_controller:
            return
        ending = f"the run is ended{self._display.resuming()}"
        self._display.warn(f"the controller does not answer, {problem}; {ending}")
        self._ended_controller = True
        await controller.stop(HURRIED_GRACE_S)

    async def _watch_events(self, controller: Child) -> None:
        self._display.last_event = 0
        async with self._calls.channel() as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)
            while not self._display.is_over:
                request = status_pb2.WatchRequest(after=self._display.last_event)
                try:
                    async for event in stub.Watch(
                        request, metadata=self._calls.metadata, wait_for_ready=controller.is_running
                    ):
                        self._display.show(event)
                        self._has_begun = True
                except grpc.aio.AioRpcError:
                    # The call may break off before the end of the process is known.
                    await within(0.5, controller.process.wait())
                    if not controller.is_running:
                        return
