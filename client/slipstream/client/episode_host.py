"""Answers the calls of rollout servers to one environment, in a worker process or in a client.

Consumes: worker commands. Produces: their answers.
Waits for: the environment's methods; a Close command or the end of the stream cancels them.
"""

import asyncio
import contextlib
import copy
import dataclasses
import hashlib
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc.aio
from slipstream.client.agent_address import HostAddress
from slipstream.client.agent_episodes import END_LIMIT_S, AgentEpisode
from slipstream.client.conversion import (
    agent_observation,
    finished_episode,
    group_verdict,
    observation,
    reply_of,
    verdict,
)
from slipstream.client.environment import AgentEnvironment, AnyEnvironment, TaskSource
from slipstream.client.environment_loader import (
    CallTracker,
    awaited_place,
    describe,
    environment_failed,
    load_environment,
)
from slipstream.core.errors import EnvironmentFailed
from slipstream.core.waits import within
from slipstream.v1 import environment_pb2 as pb
from slipstream.v1 import trajectory_pb2

if TYPE_CHECKING:
    from slipstream.client.agent_gateway import Gateway

CLOSE_TIMEOUT_S = 5.0
REFUSAL_TIMEOUT_S = 1.0
# Once so many runs of agents outlive their episodes, no new episode begins.
MAX_LEFT_RUNS = 256
# Most different failures that are told.
MAX_TOLD = 5
# The errors of writing to a stream that has ended.
STREAM_OVER = (grpc.aio.AioRpcError, asyncio.InvalidStateError)

WorkerCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.WorkerMessage, pb.WorkerCommand]"

Answer = TypeVar("Answer")


@dataclass
class _Episode:
    key: str
    environment: AnyEnvironment
    task_index: int
    # Whether `reset` has answered.
    has_begun: bool = False
    # Whether the environment gives the replies.
    gives: bool = False
    # The calls and the run, if the environment is an agent.
    agent: AgentEpisode | None = None
    # The task that answers the current reset, step or agent call.
    running: asyncio.Task[object] | None = None
    # Whether `close` has cancelled that call.
    abandoned: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class EpisodeHost:
    """Runs the episodes of one environment, as a rollout server commands."""

    def __init__(
        self,
        environment: AnyEnvironment | None = None,
        *,
        tracker: CallTracker | None = None,
        host_address: HostAddress | None = None,
    ) -> None:
        """Takes the environment, or None before a Load; raises EnvironmentFailed without tasks.

        `host_address` is the one by which agents beyond this host reach it, if they do.
        """
        self._tracker = tracker
        self._host_address = host_address
        self._tasks = _task_source(environment) if environment is not None else None
        self._episodes: dict[str, _Episode] = {}
        # Serves the endpoints of all agents, from the first one on.
        self._gateway: Gateway | None = None
        # Agents' episodes that have ended, and whose runs go on.
        self._left: list[AgentEpisode] = []

    @property
    def num_tasks(self) -> int:
        """Number of tasks; 0 if `tasks()` gave an iterator, or before an environment is loaded."""
        return self._tasks.num_tasks if self._tasks is not None else 0

    async def answer(self, command: pb.WorkerCommand) -> pb.WorkerMessage:
        """Carries out one command and returns its answer; an environment's error becomes an answer.

        A FollowAgent command is answered by the agent's next call, or by its result.
        """
        message = pb.WorkerMessage(call_id=command.call_id)
        try:
            match command.WhichOneof("command"):
                case "load":
                    spec = command.load.spec
                    arguments = spec.reference, spec.args_json, spec.search_path
                    with _ending_children():
                        self._tasks = _task_source(load_environment(*arguments))
                    loaded = pb.Loaded(num_tasks=self.num_tasks, digest=self.digest())
                    message.loaded.CopyFrom(loaded)
                case "reset":
                    message.observation.CopyFrom(await self._reset(command.reset))
                case "step":
                    message.verdict.CopyFrom(await self._step(command.step))
                case "judge_group":
                    message.group_verdict.CopyFrom(await self._judge_group(command.judge_group))
                case "follow_agent":
                    episode = self._begun(command.follow_agent.episode_key)
                    if episode.agent is None:
                        raise _misused(f"the environment of episode {episode.key} is no agent")
                    answer = await self._run(episode, episode.agent.next)
                    if isinstance(answer, pb.AgentCall):
                        message.agent_call.CopyFrom(answer)
                    else:
                        message.agent_result.CopyFrom(answer)
                case "reply_part":
                    replied = self._episodes.get(command.reply_part.episode_key)
                    # A part may cross with the end of the episode.
                    if replied is not None and replied.agent is not None:
                        await replied.agent.exchange.part(command.reply_part)
                    message.pong.SetInParent()
                case "close":
                    await self._close(command.close.episode_key)
                    message.pong.SetInParent()
                case "ping":
                    message.pong.place = self.place(command.ping.episode_key)
                case unknown:
                    raise _misused(f"unknown command {unknown}")
        except EnvironmentFailed as error:
            message.failure.kind = error.kind
            message.failure.message = str(error)
        return message

    async def close_all(self) -> None:
        """Closes every open episode within 5 s; reports failures only on stderr."""

        async def close(key: str) -> None:
            try:
                await self._close(key)
            except EnvironmentFailed as error:
                print(f"closing an episode: {error}", file=sys.stderr)

        if not await within(CLOSE_TIMEOUT_S, asyncio.gather(*map(close, self._episodes))):
            print(f"episodes did not close within {CLOSE_TIMEOUT_S:g} s", file=sys.stderr)
        self._episodes.clear()
        gateway = self._gateway
        self._gateway = None
        if gateway is not None:
            await gateway.close()

    def environment_of(self, key: str) -> AnyEnvironment:
        """Returns the copy of the environment that plays the open episode `key`."""
        return self._episodes[key].environment

    def digest(self, *, again: bool = False) -> str:
        """Returns a digest of the tasks; with `again` asks `tasks()`; raises EnvironmentFailed."""
        assert self._tasks is not None
        return digest_of(_task_source(self._tasks.environment) if again else self._tasks)

    def place(self, key: str) -> str:
        """Returns the line of code where episode `key` or its agent is, or "" if unknown."""
        if (episode := self._episodes.get(key)) is None:
            return ""
        place = "" if episode.agent is None else episode.agent.place()
        # Between two calls of an agent nothing runs for it here.
        return place or (awaited_place(episode.running) if episode.running else "")

    async def _reset(self, command: pb.ResetCommand) -> pb.Observation:
        if (tasks := self._tasks) is None:
            raise _misused("no environment is loaded")
        if command.episode_key in self._episodes:
            raise _misused(f"episode {command.episode_key} is open already")
        try:
            environment = copy.copy(tasks.environment)
            environment.seed = command.seed
            environment.truncated = False
        except BaseException as error:
            cause = f"it cannot be copied for an episode: {describe(error)}"
            raise environment_failed(cause) from error
        episode = _Episode(command.episode_key, environment, command.task_index)
        self._episodes[command.episode_key] = episode

        async def reset() -> pb.Observation:
            if isinstance(environment, AgentEnvironment):
                self._open_agent(episode, environment, tasks[command.task_index])
                return agent_observation(environment)
            opening = await _result(environment.reset(tasks[command.task_index]))
            observed = observation(opening, environment)
            episode.gives = bool(observed.given_reply)
            return observed

        # An episode that fails here is closed like any other: `reset` may have taken resources.
        observed = await self._run(episode, reset)
        episode.has_begun = True
        return observed

    def _begun(self, key: str) -> _Episode:
        episode = self._episodes.get(key)
        if episode is not None and episode.running is not None:
            raise _misused(f"episode {key} has not answered its last call")
        if episode is None or not episode.has_begun:
            raise _misused(f"episode {key} is not open")
        return episode

    def _open_agent(
        self, episode: _Episode, environment: AgentEnvironment[Any], task: object
    ) -> None:
        self._left = [run for run in self._left if run.is_alive]
        if len(self._left) >= MAX_LEFT_RUNS:
            raise environment_failed(
                f"{len(self._left)} runs go on after the end of their episodes, the limit is "
                f"{MAX_LEFT_RUNS}: run() must end when its calls are refused"
            )
        if self._gateway is None:
            # The gateway's HTTP server takes as long to import as all else in a worker.
            from slipstream.client.agent_gateway import Gateway

            self._gateway = Gateway(self._host_address)

        def note_busy(run: asyncio.Task[object], is_busy: bool) -> None:
            if self._tracker is not None and is_busy:
                self._tracker.begin(episode.key, run)
            elif self._tracker is not None:
                self._tracker.end(run)

        episode.agent = AgentEpisode(environment, task, self._gateway, on_busy=note_busy)

    async def _step(self, command: pb.StepCommand) -> pb.Verdict:
        episode = self._begun(command.episode_key)
        environment = episode.environment
        environment.truncated = command.truncated

        async def step() -> pb.Verdict:
            before = environment.max_reply_tokens
            result = await _result(environment.step(reply_of(command)))
            if environment.max_reply_tokens != before:
                raise environment_failed("max_reply_tokens must be set in reset(), not in step()")
            return verdict(result, gives=episode.gives)

        return await self._run(episode, step)

    async def _judge_group(self, command: pb.JudgeGroupCommand) -> pb.GroupVerdict:
        episode = self._begun(command.episode_key)
        environment = episode.environment
        tasks = self._tasks
        assert tasks is not None, "an episode has begun"

        async def judge() -> pb.GroupVerdict:
            task = tasks[episode.task_index]
            episodes = [finished_episode(data, task) for data in command.episodes]
            rewards = await _result(environment.judge_group(episodes))
            return group_verdict(rewards, len(episodes))

        return await self._run(episode, judge)

    async def _close(self, key: str) -> None:
        episode = self._episodes.pop(key, None)
        if episode is None:
            return
        if episode.running is not None:
            episode.abandoned = True
            episode.running.cancel()
            await episode.idle.wait()
        if episode.agent is not None and not await episode.agent.end():
            self._left.append(episode.agent)
            place = episode.agent.place()
            where = f" ({place})" if place else ""
            line = f"the run of episode {key} did not end within {END_LIMIT_S:g} s{where}"
            print(line, file=sys.stderr)
        await self._run(episode, lambda: _result(episode.environment.close()))

    async def _run(self, episode: _Episode, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Runs user code in a task; turns everything that it raises into EnvironmentFailed.

        Raises CancelledError if this task is cancelled for another reason than the episode's end.
        """
        this = asyncio.current_task()
        assert this is not None

        async def run() -> Answer:
            try:
                with _ending_children():
                    return await call()
            except (EnvironmentFailed, asyncio.CancelledError):
                raise
            except BaseException as error:
                # Raised here, a SystemExit would end the event loop.
                raise environment_failed(describe(error)) from error

        # Code that cancels its own task cancels this one, and no caller.
        episode.running = asyncio.create_task(run())
        episode.idle.clear()
        # The tracker records the run of an agent separately: this task only waits for it.
        tracker = self._tracker if episode.agent is None else None
        if tracker is not None:
            tracker.begin(episode.key, episode.running)
        try:
            return await episode.running
        except asyncio.CancelledError as error:
            if this.cancelling():
                raise
            if episode.abandoned:
                raise environment_failed("the episode was closed") from error
            cause = f"its own code has cancelled the call: {describe(error)}"
            raise environment_failed(cause) from error
        finally:
            if tracker is not None:
                tracker.end(episode.running)
            episode.running = None
            episode.abandoned = False
            episode.idle.set()


async def open_stream(open_call: Callable[[], WorkerCall], hello: pb.WorkerHello) -> WorkerCall:
    """Opens a stream and sends `hello`; reading the stream raises AioRpcError if it was refused."""
    message = pb.WorkerMessage(hello=hello)
    call = open_call()
    try:
        await call.write(message)
        return call
    except STREAM_OVER:
        # The stream was refused before the write, which has hidden why. A second stream, without a
        # write, shows the cause at once.
        call = open_call()
    if not await within(REFUSAL_TIMEOUT_S, call.code()):
        with contextlib.suppress(*STREAM_OVER):
            await call.write(message)
    return call


async def answer_commands(
    host: EpisodeHost,
    commands: AsyncIterator[pb.WorkerCommand],
    send: Callable[[pb.WorkerMessage], Awaitable[None]],
) -> None:
    """Answers `commands` concurrently until they end, then closes all episodes.

    FollowAgent gets one answer for each call of the agent, and a last one with its result. The last
    part of a reply is not answered. The first different failures are told on stderr too: those of
    `close` nowhere else. Raises the gRPC error that ended `commands`, if any.
    """
    one_at_a_time = asyncio.Lock()
    printed_causes = set[str]()

    async def answer(command: pb.WorkerCommand) -> None:
        is_followed = True
        while is_followed:
            message = await host.answer(command)
            if command.reply_part.is_last:
                return
            if (cause := message.failure.message) not in {"", *printed_causes} and len(
                printed_causes
            ) < MAX_TOLD:
                printed_causes.add(cause)
                print(f"{command.WhichOneof('command')} failed: {cause}", file=sys.stderr)
            is_followed = message.HasField("agent_call")
            try:
                async with one_at_a_time:
                    await send(message)
            except STREAM_OVER:
                # The stream is over: `commands` says why.
                return

    failure: grpc.aio.AioRpcError | None = None
    try:
        async with asyncio.TaskGroup() as group:
            running: set[asyncio.Task[None]] = set()
            try:
                async for command in commands:
                    task = group.create_task(answer(command))
                    running.add(task)
                    task.add_done_callback(running.discard)
            except grpc.aio.AioRpcError as error:
                failure = error
            for task in running:
                task.cancel()
    finally:
        await host.close_all()
    if failure is not None:
        raise failure


@contextlib.contextmanager
def _ending_children() -> Iterator[None]:
    """Ends a process that the block has forked, and that would go on as this one behind it."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            # The loader of an environment has given SystemExit a cause in words.
            error = getattr(sys.exception(), "__cause__", None) or sys.exception()
            status = error.code if isinstance(error, SystemExit) else error
            os._exit(status if isinstance(status, int) else status is not None)


async def _result(value: Answer | Awaitable[Answer]) -> Answer:
    return await value if inspect.isawaitable(value) else value


def _task_source(environment: AnyEnvironment) -> TaskSource[object]:
    try:
        return TaskSource(environment)
    except ValueError as error:
        raise environment_failed(describe(error)) from error
    except BaseException as error:
        raise environment_failed(f"tasks() failed: {describe(error)}") from error


def _misused(message: str) -> EnvironmentFailed:
    return EnvironmentFailed(trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE, message)


# Tasks of a list that a digest reads, evenly spaced; of a sequence that may have to load each one,
# and of an iterator.
MAX_LISTED = 4096
MAX_LOADED = 16


def digest_of(tasks: TaskSource[Any]) -> str:
    """Returns a digest of number, order and content of tasks, or "" if one cannot be read.

    Objects other than values of JSON, dataclasses, sets and arrays count by their type alone.
    """
    digest = hashlib.sha256(str(tasks.num_tasks).encode())
    num_read = MAX_LISTED if tasks.is_listed else MAX_LOADED
    try:
        for place in spaced(tasks.num_tasks or MAX_LOADED, num_read):
            digest.update(_text(tasks[place]).encode(errors="surrogatepass"))
    except BaseException as error:  # noqa: BLE001
        # The episode of such a task fails with the cause.
        print(f"a task cannot be read: {error!r}", file=sys.stderr)
        return ""
    return digest.hexdigest()[:32]


def spaced(number: int, most: int) -> Sequence[int]:
    """Returns at most `most` of the indices below `number`, evenly spaced, with first and last."""
    if number <= most:
        return range(number)
    return [place * (number - 1) // max(most - 1, 1) for place in range(most)]


def _text(value: object) -> str:
    try:
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError, RecursionError):
        # A key that is no text, or an object that contains itself.
        return _name(value)


def _plain(value: object) -> object:
    """Returns what JSON can write in place of `value`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_name(value), {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}]
    if isinstance(value, Mapping):
        return [[_text(key), _text(item)] for key, item in value.items()]
    if isinstance(value, Set):
        # The order of a set differs between processes.
        return sorted(map(_text, value))
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    listed = getattr(value, "tolist", None)
    return listed() if callable(listed) else _name(value)


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
