"""The environments of a run, the choice of the next task, and calls to environments of clients.

The next group is of the environment that is furthest behind its weight in leased and trained
groups. At the start of a run nothing is leased in place of one that still loads.

The relay consumes: calls of rollout servers, answers of clients. Produces: the same messages for
the other side, with new call ids. Waits for: messages. Unblocked by: a message, or the end of
either stream, which fails the stream's open calls. Calls to a client that does not read fail, and a
rollout server that does not read loses its stream.
"""

import asyncio
import itertools
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc
import numpy as np
import numpy.typing as npt
from slipstream.core.group_sizes import GroupSizes
from slipstream.learner.controller.records.state import EnvironmentCounts, RunState
from slipstream.learner.controller.run import LoopClock
from slipstream.learner.controller.servers.session import (
    CallContext,
    Message,
    Outbox,
    ServerKey,
)
from slipstream.protocol.rich_errors import Reason, abort
from slipstream.v1 import environment_pb2 as pb
from slipstream.v1 import fleet_pb2, trajectory_pb2

# Above this number tasks are taken in their own order: a permutation would not fit into memory.
MAX_SHUFFLED_TASKS = 1_000_000
# Largest number of different events of one kind about an environment, and of kinds remembered.
MAX_TOLD = 3
MAX_KINDS = 1000
# Tasks in a row with too long a prompt that suspend an environment; all tasks if it has fewer.
MAX_SKIPPED_TASKS = 1000
# Ended groups per trained group up to which an environment gets its full share of trained groups.
# Without this bound, an environment whose groups mostly fail would take the leases of all others.
MAX_ENDED_PER_TRAINED = 2


@dataclass(eq=False)
class DrawnTasks:
    """The draws of one environment, by weights in place of rounds in a random order."""

    # Reward of an episode that passes.
    pass_reward: float = 1.0
    # Sums of the weights up to each task, [tasks]; None before the first weights.
    cumulative: npt.NDArray[np.float64] | None = None

    def draw(self, number: str) -> int:
        """Returns the task that is drawn by the seed `number`: the same for the same weights."""
        assert self.cumulative is not None
        total = float(self.cumulative[-1])
        place = min(random.Random(number).random() * total, math.nextafter(total, 0.0))
        # The first task whose sum lies above: its weight is not 0.
        return int(np.searchsorted(self.cumulative, place, side="right"))


@dataclass(eq=False)
class EnvironmentEntry:
    """One environment of the run."""

    spec: pb.EnvironmentSpec
    # The journal's counts of its groups.
    counts: EnvironmentCounts
    # Whether the run starts with it: the others get no more than their part while it loads.
    starts_run: bool = False
    state: pb.EnvironmentState = pb.ENVIRONMENT_STATE_PENDING
    num_tasks: int = 0
    cause: str = ""
    loaded_on: set[ServerKey] = field(default_factory=set)
    failed_on: dict[ServerKey, str] = field(default_factory=dict)
    # Episodes that the serving client takes. None if servers host the environment.
    client_episodes: int | None = None
    # The commands for that client while its stream is open.
    client: Outbox[pb.WorkerCommand] | None = None
    # Number of each group that failed since the last complete group.
    failed_in_a_row: list[int] = field(default_factory=list)
    # Number of tasks skipped because their prompt is too long.
    tasks_skipped: int = 0
    skipped_in_a_row: int = 0
    episodes_failed: int = 0
    # The events about the environment that were added, by kind; see `is_news`.
    told: dict[str, set[str]] = field(default_factory=dict)
    reward_sum: float = 0.0
    rewards: int = 0
    # The order of the tasks in the round `order_round`.
    order: list[int] = field(default_factory=list)
    order_round: int = 0

    @property
    def is_training(self) -> bool:
        return self.spec.purpose == trajectory_pb2.EPISODE_PURPOSE_TRAINING

    @property
    def is_ready(self) -> bool:
        return self.state == pb.ENVIRONMENT_STATE_READY

    @property
    def is_suspended(self) -> bool:
        return self.state == pb.ENVIRONMENT_STATE_SUSPENDED

    @property
    def share(self) -> float:
        """Number of leased and trained groups divided by the weight, plus the head start.

        At least 1 / `MAX_ENDED_PER_TRAINED` of the ended groups count as trained.
        """
        counts = self.counts
        trained = counts.accepted - counts.filtered
        ended = counts.accepted + counts.failed
        dealt = counts.leased + max(trained, ended / MAX_ENDED_PER_TRAINED)
        return counts.head_start + dealt / self.spec.weight

    def runs_on(self, key: ServerKey) -> bool:
        """Whether a server can run the environment's episodes now."""
        return self.client_episodes is not None or key in self.loaded_on

    def may_load_on(self, key: ServerKey) -> bool:
        """Whether the run starts with the environment and a server may be the first to load it."""
        is_pending = self.state == pb.ENVIRONMENT_STATE_PENDING
        return self.starts_run and is_pending and key not in self.failed_on

    def is_news(self, kind: str, text: str = "") -> bool:
        """Notes `text`; returns False if it was noted before or its `kind` has `MAX_TOLD` texts.

        A kind may hold the cause of a failure, of which a long run has ever new ones: after
        `MAX_KINDS` other kinds a kind is forgotten.
        """
        texts = self.told.setdefault(kind, set())
        if len(self.told) > MAX_KINDS:
            del self.told[next(iter(self.told))]
        if text in texts or len(texts) >= MAX_TOLD:
            return False
        texts.add(text)
        return True

    def loaded(self, key: ServerKey, num_tasks: int) -> None:
        """Notes that a server has loaded the environment, which has `num_tasks` tasks."""
        if self.num_tasks != num_tasks:
            self.order.clear()
        self.loaded_on.add(key)
        self.failed_on.pop(key, None)
        self.num_tasks = num_tasks
        if self.state == pb.ENVIRONMENT_STATE_PENDING:
            self.state = pb.ENVIRONMENT_STATE_READY

    def load_failed(self, key: ServerKey, cause: str) -> None:
        """Notes that a server has no worker that loaded the environment and has not ended."""
        self.loaded_on.discard(key)
        self.failed_on[key] = cause
        self.cause = cause

    def group_complete(self) -> None:
        """Notes that a group is complete, and resets the counts of failures in a row."""
        self.failed_in_a_row.clear()
        self.skipped_in_a_row = 0

    def group_failed(
        self,
        number: int,
        cause: str,
        *,
        oldest_open: float,
        most: int,
    ) -> bool:
        """Notes a set-aside group; returns whether to suspend it after `most` in a row.

        `number` is the group's number in the order of leases, and `oldest_open` is the number of
        the environment's oldest incomplete group. Only failed groups with smaller numbers count,
        because failures end sooner than successes.
        """
        self.failed_in_a_row.append(number)
        self.cause = cause
        return (
            sum(number < oldest_open for number in self.failed_in_a_row) >= most and self.is_ready
        )

    def task_skipped(self) -> bool:
        """Counts a task with too long a prompt; returns whether to suspend the environment."""
        self.tasks_skipped += 1
        self.skipped_in_a_row += 1
        many = min(self.num_tasks or MAX_SKIPPED_TASKS, MAX_SKIPPED_TASKS)
        return self.skipped_in_a_row >= many and self.is_ready

    def describe(self) -> pb.EnvironmentStatus:
        """Returns the entry in the form in which readers may see it: arguments may hold keys."""
        spec = pb.EnvironmentSpec()
        spec.CopyFrom(self.spec)
        spec.ClearField("args_json")
        newest_round = None
        if (measured := self.counts.measured) is not None:
            numbers = measured.evaluations[spec.name]
            newest_round = pb.EvaluationRound(step=measured.version, numbers=numbers)
        return pb.EnvironmentStatus(
            spec=spec,
            state=pb.EnvironmentState.Name(self.state),
            num_tasks=self.num_tasks,
            cause=self.cause,
            groups_accepted=self.counts.accepted,
            groups_failed=self.counts.failed,
            episodes_failed=self.episodes_failed,
            reward_mean=self.reward_sum / self.rewards if self.rewards else 0.0,
            newest_round=newest_round,
        )


class EnvironmentBook:
    """All environments of a run, by name; the book uses no clock and no I/O.

    After a restart, suspended environments are active again.
    """

    def __init__(self, state: RunState, *, seed: int) -> None:
        self._state = state
        self._seed = seed
        self.entries: dict[str, EnvironmentEntry] = {}
        # The environments whose tasks are drawn by weights, by name, there or not yet.
        self.drawn: dict[str, DrawnTasks] = {}

    def add(self, spec: pb.EnvironmentSpec, *, starts_run: bool = False) -> EnvironmentEntry:
        """Adds an environment, or replaces a suspended one with its name."""
        counts = self._state.environments[spec.name]
        entry = EnvironmentEntry(spec, counts, starts_run=starts_run)
        self.entries[spec.name] = entry
        return entry

    def head_start(self, latecomer: EnvironmentEntry) -> float:
        """Returns the head start with which a latecomer gets its part and does not catch up."""
        shares = [e.share for e in self.training() if e.is_ready and e is not latecomer]
        behind = min(shares, default=0.0) - latecomer.share
        return latecomer.counts.head_start + max(behind, 0.0)

    def training(self) -> list[EnvironmentEntry]:
        """Returns the environments whose episodes are trained."""
        return [entry for entry in self.entries.values() if entry.is_training]

    def suspended(self) -> dict[str, str]:
        """Returns the cause of each suspended training environment, by name."""
        return {e.spec.name: e.cause for e in self.training() if e.is_suspended}

    def evaluations(self) -> list[EnvironmentEntry]:
        """Returns the environments that are only evaluated."""
        return [entry for entry in self.entries.values() if not entry.is_training]

    def next_for(
        self, key: ServerKey, open_episodes: Mapping[str, int], sizes: GroupSizes
    ) -> EnvironmentEntry | None:
        """Returns the environment for the next group on server `key`; groups have these `sizes`.

        Returns None if none may run, or if the group is due to one that still loads there or waits
        for its first weights.
        """
        environments = self.training()
        ready = [
            entry
            for entry in environments
            if self.may_run(entry, key, open_episodes, sizes.of(entry.spec.name))
        ]
        nearest = min(ready, key=lambda entry: entry.share, default=None)
        if nearest is None:
            return None
        loading = [
            entry
            for entry in environments
            if entry.may_load_on(key) or (entry.runs_on(key) and self._awaits_weights(entry))
        ]
        if any(entry.share < nearest.share for entry in loading):
            return None
        return nearest

    def _awaits_weights(self, entry: EnvironmentEntry) -> bool:
        drawn = self.drawn.get(entry.spec.name)
        return entry.is_ready and drawn is not None and drawn.cumulative is None

    def may_run(
        self,
        entry: EnvironmentEntry,
        key: ServerKey,
        open_episodes: Mapping[str, int],
        episodes: int,
    ) -> bool:
        """Whether `episodes` more episodes of `entry` may run on server `key`.

        The environment must be ready, with weights if its tasks are drawn by them. It must be
        loaded on the server, or be served by a client that has room for the episodes.
        """
        has_room = (
            entry.client_episodes is None
            or open_episodes.get(entry.spec.name, 0) + episodes <= entry.client_episodes
        )
        is_ready = entry.is_ready and not self._awaits_weights(entry)
        return is_ready and entry.runs_on(key) and has_room

    def next_task(self, entry: EnvironmentEntry) -> tuple[int, int]:
        """Returns index and seed of the next task.

        Each round has a seeded random order, or each task is drawn by its weight.
        """
        number = entry.counts.next_number
        name = entry.spec.name
        seed = random.Random(f"{self._seed}/{name}/{number}").getrandbits(48)
        if (drawn := self.drawn.get(name)) is not None:
            return drawn.draw(f"{self._seed}/{name}/draw/{number}"), seed
        if entry.num_tasks == 0 or entry.num_tasks > MAX_SHUFFLED_TASKS:
            return number, seed
        round_number, place = divmod(number, entry.num_tasks)
        if round_number != entry.order_round or not entry.order:
            entry.order = list(range(entry.num_tasks))
            entry.order_round = round_number
            random.Random(f"{self._seed}/{name}/order/{round_number}").shuffle(entry.order)
        return entry.order[place], seed

    def server_lost(self, key: ServerKey) -> None:
        """Forgets the workers of a lost server."""
        for entry in self.entries.values():
            entry.loaded_on.discard(key)
            entry.failed_on.pop(key, None)


@dataclass(frozen=True)
class RelayedCall:
    """An open call: the outbox of the server that made it, its call id, and the client's outbox.

    `followed` is the key of the episode whose agent the call follows, or "" if it follows none.
    """

    answers: Outbox[fleet_pb2.EnvironmentAnswer]
    call_id: int
    client: Outbox[pb.WorkerCommand]
    followed: str = ""


class Relay:
    """Connects rollout servers with the clients that serve environments."""

    def __init__(self, entries: Mapping[str, EnvironmentEntry]) -> None:
        # The environments of the run, by name.
        self._entries = entries
        self._calls: dict[int, RelayedCall] = {}
        self._numbers = itertools.count(1)

    async def serve_episodes(
        self, entry: EnvironmentEntry, requests: AsyncIterator[pb.WorkerMessage]
    ) -> AsyncGenerator[pb.WorkerCommand, None]:
        """Yields commands for a client that serves the environment `entry`."""
        client = entry.client = Outbox[pb.WorkerCommand]()
        try:
            async with aclosing(client.messages(self._read_answers(client, requests))) as commands:
                async for command in commands:
                    yield command
        finally:
            entry.client = None
            for number, call in list(self._calls.items()):
                if call.client is client:
                    del self._calls[number]
                    cause = f"the client that served {entry.spec.name} left"
                    _answer(call.answers, _lost(call.call_id, cause))

    async def call_environments(
        self, requests: AsyncIterator[fleet_pb2.EnvironmentCall]
    ) -> AsyncGenerator[fleet_pb2.EnvironmentAnswer, None]:
        """Relays a rollout server's calls to clients; yields the answers as they arrive.

        At the end of the server's stream, clients close the episodes that it has left open.
        """
        answers = Outbox[fleet_pb2.EnvironmentAnswer]()
        # The client of each open episode, by the episode's key.
        episodes: dict[str, Outbox[pb.WorkerCommand]] = {}
        try:
            reading = self._read_calls(requests, answers, episodes)
            async with aclosing(answers.messages(reading)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._calls = {n: c for n, c in self._calls.items() if c.answers is not answers}
            for key, client in episodes.items():
                close = pb.CloseCommand(episode_key=key)
                client.put(pb.WorkerCommand(call_id=next(self._numbers), close=close))

    def close(self) -> None:
        """Ends the streams of all clients."""
        for entry in self._entries.values():
            if entry.client is not None:
                entry.client.close()

    async def _read_calls(
        self,
        requests: AsyncIterator[fleet_pb2.EnvironmentCall],
        answers: Outbox[fleet_pb2.EnvironmentAnswer],
        episodes: dict[str, Outbox[pb.WorkerCommand]],
    ) -> None:
        async for call in requests:
            episodes.pop(call.command.close.episode_key, None)
            entry = self._entries.get(call.environment)
            if entry is None or (client := entry.client) is None:
                cause = f"no client serves {call.environment}"
                _answer(answers, _lost(call.command.call_id, cause))
                continue
            number = next(self._numbers)
            if call.command.HasField("reset"):
                episodes[call.command.reset.episode_key] = client
            # Nothing answers the last part of a reply.
            if not call.command.reply_part.is_last:
                followed = call.command.follow_agent.episode_key
                opened = RelayedCall(answers, call.command.call_id, client, followed)
                self._calls[number] = opened
            command = pb.WorkerCommand()
            command.CopyFrom(call.command)
            command.call_id = number
            if not client.put(command):
                self._calls.pop(number, None)
                cause = f"the client that serves {call.environment} does not read"
                _answer(answers, _lost(call.command.call_id, cause))
                # Without a part of its reply the agent is lost, too.
                episode = call.command.reply_part.episode_key
                for number, opened in list(self._calls.items()):
                    if episode and opened.followed == episode and opened.answers is answers:
                        del self._calls[number]
                        _answer(answers, _lost(opened.call_id, cause))

    async def _read_answers(
        self, client: Outbox[pb.WorkerCommand], requests: AsyncIterator[pb.WorkerMessage]
    ) -> None:
        async for message in requests:
            call = self._calls.get(message.call_id)
            # Only the client that got the call may answer it.
            if call is not None and call.client is client:
                # An agent is followed by one call until its result.
                if not message.HasField("agent_call"):
                    del self._calls[message.call_id]
                message.call_id = call.call_id
                _answer(call.answers, fleet_pb2.EnvironmentAnswer(message=message))


async def first_message(
    requests: AsyncIterator[Message], context: CallContext, clock: LoopClock, *, limit_s: float
) -> Message:
    """Returns the first message of a stream; rejects the call if none comes within `limit_s`."""
    first = asyncio.ensure_future(anext(requests))
    try:
        await clock.wait([first], limit_s)
        if not first.done():
            raise TimeoutError
        return first.result()
    except (TimeoutError, StopAsyncIteration):
        code = grpc.StatusCode.INVALID_ARGUMENT
        text = "the first message is a hello"
        await abort(context, code, text, Reason.PROTOCOL)
    finally:
        first.cancel()


def _answer(
    answers: Outbox[fleet_pb2.EnvironmentAnswer], answer: fleet_pb2.EnvironmentAnswer
) -> None:
    """Sends an answer; if the server does not read, ends its stream, and the server reconnects."""
    if not answers.put(answer):
        answers.close()


def _lost(call_id: int, cause: str) -> fleet_pb2.EnvironmentAnswer:
    failure = trajectory_pb2.Failure(kind=trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE, message=cause)
    return fleet_pb2.EnvironmentAnswer(message=pb.WorkerMessage(call_id=call_id, failure=failure))
