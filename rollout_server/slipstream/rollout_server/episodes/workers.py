"""One environment worker process, from its start to its exit.

Consumes: an environment's spec. Produces: sessions of its episodes. Waits for: the worker to
connect, to load, to exit. Unblocked by: the worker, or the limit of the wait.
"""

import asyncio
import contextlib
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

from slipstream.core.errors import EnvironmentFailed
from slipstream.core.machine.other_python import worker_program
from slipstream.core.machine.warm_start import NoWarmParent, WarmStart
from slipstream.core.waits import within
from slipstream.rollout_server.episodes.calls import (
    MAX_MESSAGE_CHARACTERS,
    StreamSession,
    check_tools,
    misused,
)
from slipstream.rollout_server.episodes.worker_gateway import (
    WorkerGateway,
    WorkerProcess,
    WorkerStream,
)
from slipstream.v1 import environment_pb2, trajectory_pb2

_log = logging.getLogger(__name__)
UNLOADED = trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE, "the environment was unloaded"
_STOP_LIMIT_S = 2.0
# Least seconds for a worker to load its environment, and seconds for it to answer a ping.
LOAD_S = 60.0
PING_S = 5.0
# Ends of workers in a row after which a task is a suspect, even if it was in no call then.
MAX_LOST_WORKERS = 2
# Largest number of tasks that are suspected together.
MAX_SUSPECTED = 8
# Seconds for which a task is set aside that ended a worker of its own: its group is over by then.
SET_ASIDE_S = 60.0
# After an end of a worker: seconds between two looks whether a call holds up the others of its
# worker, and the part of the environment's limit for which it may.
LOOK_S = 1.0
_HELD_UP_PART = 0.2
# After the end of a worker, 1 / `_NARROWING` of its episodes may share one.
_NARROWING = 4


class EnvironmentWorker:
    """One worker process, from its start to its exit; it is not started again.

    States: started -> connected -> loaded -> ended. Its open episodes are lost when it ends.
    """

    def __init__(
        self,
        gateway: WorkerGateway,
        spec: environment_pb2.EnvironmentSpec,
        suspects: "Suspects",
        *,
        try_reset: bool = False,
        is_warm: bool = False,
    ) -> None:
        """`suspects` records the tasks that ran at the worker's end, and the tasks that passed.

        With `try_reset` the worker counts as loaded only when its first task has answered `reset`
        and, for an agent, made its first call, which is not answered. With `is_warm` it is forked
        by a process that has imported what it needs.
        """
        self._gateway = gateway
        self._spec = spec
        self._suspects = suspects
        self._try_reset = try_reset
        self._is_warm = is_warm
        self.ping_s = PING_S
        self.look_s = LOOK_S
        self._stream, self._gone = WorkerStream(), asyncio.Event()
        self.table = self._stream.table
        self._process: WorkerProcess
        # The worker's log, and where its own lines begin there.
        self._log: tuple[Path, int]
        # Open episodes by key, and the task of each.
        self.episodes: dict[str, int] = {}
        # Whether one call keeps the worker from answering those of other episodes.
        self.is_held_up = False
        # Why the server ended the worker, and the episode that blocked it, "" if unknown.
        self._hang: EnvironmentFailed | None = None
        self._culprit = ""

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended the process; False until `run` has returned."""
        return self._gone.is_set() and self._process.was_killed

    @property
    def takes_episodes(self) -> bool:
        """Whether an episode may begin here: the worker has not ended, and no call holds it up."""
        return self.table.failure is None and not self.is_held_up

    def open(
        self,
        episode_key: str,
        task_index: int,
        timeout_s: float,
        *,
        closed: Callable[[], object] = lambda: None,
    ) -> StreamSession:
        """Opens the session of an episode, each call of which is limited to `timeout_s`.

        At the end of the session `closed` is called.
        """

        def on_close(was_judged: bool) -> None:
            self.episodes.pop(episode_key, None)
            if was_judged and self.table.failure is None:
                self._suspects.passed(task_index)
            closed()

        self.episodes[episode_key] = task_index
        return StreamSession(
            self.table,
            episode_key,
            timeout_s,
            on_timeout=partial(self._examine, episode_key),
            on_close=on_close,
        )

    async def run(
        self, index: int, loaded: Callable[[environment_pb2.Loaded], None]
    ) -> EnvironmentFailed:
        """Runs until the worker has ended, and returns the cause.

        `index` is part of the name of the worker's log. `loaded` is called with the number of tasks
        when the environment has loaded. Open calls fail with the cause that is returned. A
        cancellation of `run` ends the process too.
        """
        try:
            self._process = await self._start(index)
        except OSError as error:
            # Environments may have used up the processes that the machine can have.
            self._gateway.forget(self._stream)
            what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
            cause = f"no worker could be started: {what}"
            return EnvironmentFailed(trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE, cause)
        try:
            async with asyncio.TaskGroup() as group:
                waits = (self._watch_exit(), self._watch_stream(), self._watch_calls())
                watches = [group.create_task(wait) for wait in waits]
                try:
                    return await self._serve(loaded)
                finally:
                    for watch in watches:
                        watch.cancel()
        finally:
            self._gateway.forget(self._stream)
            self.table.end(*UNLOADED)
            await self._process.close()

    async def _start(self, index: int) -> WorkerProcess:
        self._gateway.expect(self._stream)
        name = re.sub(r"[^\w.-]", "_", self._spec.name)
        # The servers of one machine write into the same folder.
        log_name = f"{self._gateway.server}-environment-{name}-{index}.log"
        with self._gateway.logs.output(log_name) as log:
            self._log = Path(log.name), log.seek(0, os.SEEK_END)
            if self._is_warm:
                try:
                    return await self._fork(log.fileno())
                except NoWarmParent as error:
                    _log.warning("environment %s: %s", self._spec.name, error)
            command = [*worker_program(self._spec.python), "--connect", self._gateway.address]
            return await WorkerProcess.start(
                command,
                limits=self._gateway.limits,
                token=self._stream.token,
                log=log.fileno(),
                variables=self._gateway.variables,
            )

    async def _fork(self, log: int) -> WorkerProcess:
        limits = self._gateway.limits
        address = self._gateway.address
        worker = WarmStart(address=address, token=self._stream.token, bounds=limits.bounds)
        parent = self._gateway.warm_parent(self._spec.python)
        return await WorkerProcess.fork(parent, worker, log=log)

    async def _serve(self, loaded: Callable[[environment_pb2.Loaded], None]) -> EnvironmentFailed:
        load = environment_pb2.WorkerCommand(load=environment_pb2.LoadCommand(spec=self._spec))
        limit_s = self._gateway.limits.start_s
        if not await within(limit_s, self._stream.attached.wait()):
            cause = f"worker did not attach within {limit_s:g} s"
            return EnvironmentFailed(trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE, cause)
        try:
            answer = await self.table.call(load, timeout_s=max(self._spec.timeout_s, LOAD_S))
            if self._try_reset:
                await self._reset_once()
        except EnvironmentFailed as error:
            return error
        loaded(answer.loaded)
        await self._gone.wait()
        assert self.table.failure is not None, "a worker that is gone takes no call"
        return self.table.failure

    async def _reset_once(self) -> None:
        """Resets the first task; waits for an agent's first call, but does not answer it."""
        limit_s = self._spec.timeout_s
        session = self.open("first-reset", 0, limit_s)
        try:
            opening = await session.reset(0, 0)
            check_tools(opening.tools_json, takes_tools=self._gateway.takes_tools)
            if not opening.is_agent:
                return
            async with asyncio.timeout(limit_s):
                message = await session.next_call()
            if isinstance(message, environment_pb2.AgentResult):
                raise misused("run() ended without a call to its endpoint")
        except TimeoutError:
            late = EnvironmentFailed(
                trajectory_pb2.FAILURE_KIND_TIMEOUT,
                f"the agent did not call the model within {limit_s:g} s, the environment's "
                f"timeout_s",
            )
            raise await session.examine(late) from None
        finally:
            session.close()

    async def _watch_exit(self) -> None:
        ended = await self._process.wait()
        calls = self._process.calls()
        if not self._stream.attached.is_set():
            path, begin = self._log
            printed = b""
            with contextlib.suppress(OSError):
                printed = path.read_bytes()
                # The log may have been trimmed meanwhile.
                printed = printed[begin if begin <= len(printed) else 0 :].strip()
            last = printed.rpartition(b"\n")[2].decode(errors="replace") or "without a word"
            ended = f"{ended} before it attached: {last:.{MAX_MESSAGE_CHARACTERS - 80}}"
        elif calls.current in self.episodes:
            ended = f"{ended} ({calls.place})"
        if self.table.failure is None:
            self._lose(ended, calls.running)
        self._gone.set()
        # The tasks that wait for it to attach learn of its end.
        self._stream.attached.set()

    def _lose(self, cause: str, in_call: Collection[str]) -> None:
        """Fails all calls with `cause`, and reports the lost episodes' tasks to `Suspects`.

        `in_call` has the keys of the episodes with a call in progress. The failure's kind is
        BYSTANDER if several episodes shared the worker, else ENVIRONMENT.
        """
        tasks = self.episodes
        suspects = {task for task in tasks.values() if self._suspects.runs_alone(task)}
        self._suspects.lost(tasks.values(), in_call=[tasks[key] for key in in_call if key in tasks])
        kind = trajectory_pb2.FAILURE_KIND_ENVIRONMENT
        if len(tasks) == 1:
            for task in suspects:
                self._suspects.ended_alone(task, cause, now_s=time.monotonic())
        if len(tasks) > 1:
            kind = trajectory_pb2.FAILURE_KIND_BYSTANDER
            cause = f"{cause}; {len(tasks)} episodes shared it"
        self.table.end(kind, cause)

    async def _watch_stream(self) -> None:
        await self._stream.over.wait()
        # The worker is about to exit; its code says more than the end of its stream.
        await asyncio.sleep(_STOP_LIMIT_S)
        self._process.end()

    async def _watch_calls(self) -> None:
        """Lets episodes go elsewhere while a call of another one holds up their worker.

        Does so only after an end of a worker: such an environment may hang, while others are slow.
        """
        limit_s = max(self.look_s, _HELD_UP_PART * self._spec.timeout_s)
        while self.table.failure is None:
            await asyncio.sleep(self.look_s)
            if len(self.episodes) < 2 or math.isinf(self._suspects.most_together):
                self.is_held_up = self.is_held_up and len(self.episodes) > 0
                continue
            ping = environment_pb2.WorkerCommand(ping=environment_pb2.PingCommand())
            try:
                await self.table.call(ping, timeout_s=limit_s)
            except EnvironmentFailed as error:
                if error.kind == trajectory_pb2.FAILURE_KIND_TIMEOUT:
                    self._let_others_go()
            else:
                self.is_held_up = False

    def _let_others_go(self) -> None:
        calls = self._process.calls()
        if calls.current not in self.episodes:
            return
        self.is_held_up = True
        cause = f"another episode holds up its worker ({calls.place})"
        failure = EnvironmentFailed(trajectory_pb2.FAILURE_KIND_BYSTANDER, cause)
        self.table.fail_beside(calls.current, failure)

    async def _examine(self, key: str, late: EnvironmentFailed) -> EnvironmentFailed:
        """Returns the error to raise for the timeout `late`; it says which code hangs, if known.

        Ends a worker that does not answer a ping. If the worker has ended meanwhile, the error
        returned is the cause of its end.
        """
        ping = environment_pb2.WorkerCommand(ping=environment_pb2.PingCommand(episode_key=key))
        try:
            # A worker that is held up was asked before.
            limit_s = min(self.ping_s, self.look_s) if self.is_held_up else self.ping_s
            answer = await self.table.call(ping, timeout_s=limit_s)
        except EnvironmentFailed as error:
            if error.kind != trajectory_pb2.FAILURE_KIND_TIMEOUT:
                # The worker ended meanwhile: another episode may have found that this one hangs it.
                return self._hang if self._hang and key == self._culprit else error
        else:
            return _at(late, answer.pong.place)
        if self._hang is None:
            calls = self._process.calls()
            self._culprit = calls.current or (key if len(self.episodes) == 1 else "")
            self._hang = _at(late, calls.place)
            self._lose(str(self._hang), {self._culprit})
            self._process.end()
        if key == self._culprit:
            return self._hang
        kind = trajectory_pb2.FAILURE_KIND_BYSTANDER
        return EnvironmentFailed(kind, f"another episode held up its worker: {self._hang}")


def _at(late: EnvironmentFailed, place: str) -> EnvironmentFailed:
    return EnvironmentFailed(late.kind, f"{late} ({place})") if place else late


class Suspects:
    """The tasks that may end workers of one environment, and how many episodes may share one; pure.

    A task becomes suspect if a worker ended during one of its calls, or if it has lost
    `MAX_LOST_WORKERS` workers. It stays suspect until one of its episodes passes:

        lost([3, 4, 5], in_call=[4]) -> 4 runs alone; passed(4) -> 4 shares a worker again

    Where more than `MAX_SUSPECTED` tasks come into question, none is suspected. Each end leaves
    fewer episodes to a worker, until few or one come into question. As many passes in a row as
    there are episodes to a worker double that number.

    A suspect that has ended a worker in which it was alone is set aside, until one of its episodes
    passes elsewhere: its others would cost a worker each, and end in the same way.
    """

    def __init__(self) -> None:
        self._suspected: set[int] = set()
        self._lost: Counter[int] = Counter()
        # How many episodes may share a worker.
        self.most_together = math.inf
        self._num_passed = 0
        # Tasks that are set aside: until when, by the caller's clock, and why.
        self._set_aside: dict[int, tuple[float, str]] = {}

    def ended_alone(self, task: int, cause: str, *, now_s: float) -> None:
        """Records that a worker, in which an episode of this suspect was alone, ended."""
        why = f"{cause}; its task ended a worker in which it was alone"
        self._set_aside[task] = (now_s + SET_ASIDE_S, why)

    def refusal(self, task: int, *, now_s: float) -> str:
        """Returns why no episode of this task begins now, or ""."""
        until_s, why = self._set_aside.get(task, (now_s, ""))
        if now_s < until_s:
            return why
        self._set_aside.pop(task, None)
        return ""

    def runs_alone(self, task: int) -> bool:
        """Returns whether episodes of this task get a worker of their own."""
        return task in self._suspected

    def lost(self, tasks: Iterable[int], *, in_call: Iterable[int]) -> None:
        """Records the end of a worker that ran episodes of `tasks`, a task for each episode.

        Those `in_call` had a call in progress.
        """
        episodes = list(tasks)
        called = set(in_call)
        together = set(episodes)
        if len(episodes) > 1:
            self.most_together = max(1, len(episodes) // _NARROWING)
            self._num_passed = 0
        if len(called) <= MAX_SUSPECTED:
            self._suspected |= called
        if len(together) <= MAX_SUSPECTED:
            self._lost.update(together)
            self._suspected |= {task for task in together if self._lost[task] >= MAX_LOST_WORKERS}

    def passed(self, task: int) -> None:
        """Records that an episode of this task was judged or failed, and the worker survived."""
        self._suspected.discard(task)
        self._lost.pop(task, None)
        self._set_aside.pop(task, None)
        self._num_passed += 1
        if self._num_passed >= self.most_together:
            self.most_together *= 2
            self._num_passed = 0
