"""A run in simulated time: the controller's own lease book and lease pass, and counted engines.

Consumes: the lengths of all replies, the speeds of both fleets, a schedule. Produces: the seconds
of a step. Pure: no clock, no I/O.

An engine's step takes `step_s + request_s * n` with n running replies, and gives each one token.
Two H200s were so: benchmarks/results/schedules.md compares.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import numpy as np
from slipstream.core.types import (
    GroupId,
    PolicyVersion,
    Purpose,
    ServerId,
    Status,
    Trajectory,
    VersionSpan,
)
from slipstream.learner.controller.leasing.groups import Fate
from slipstream.learner.controller.leasing.lease_pass import Grant, LeaseWait, NewLeases, rooms
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.learner.controller.tasks.environments import EnvironmentBook, EnvironmentEntry
from slipstream.v1 import environment_pb2, trajectory_pb2
from workloads import reply_length

# Steps before the first one that counts; a run needs as many as a group may wait.
WARMUP_STEPS = 24
_REPLY = Trajectory(
    run_id="r",
    group_id=GroupId("g"),
    member=0,
    attempt=0,
    server_id=ServerId("a"),
    server_epoch=0,
    environment="e",
    task_index=0,
    seed=0,
    purpose=Purpose.TRAINING,
    status=Status.COMPLETED,
    token_ids=np.array([1, 2], np.uint32),
    run_lengths=(1, 1),
    behavior_logprobs=np.array([-1.0], np.float32),
    version_spans=(VersionSpan(1, PolicyVersion(0, 0)),),
)


@dataclass(frozen=True)
class Machines:
    """The speeds of both fleets; the defaults are those of 0.6B on two H200s, one for each."""

    num_servers: int = 1
    max_episodes: int = 256
    step_s: float = 1.7e-3
    request_s: float = 13.7e-6
    training_s: float = 0.235
    publish_s: float = 0.016

    def decoding_s(self, running: int) -> float:
        """Seconds of an engine's step with this many running replies."""
        return self.step_s + self.request_s * running

    @property
    def tokens_per_s(self) -> float:
        """The tokens that all servers make in a second while none is short of work."""
        return self.num_servers * self.max_episodes / self.decoding_s(self.max_episodes)


@dataclass(frozen=True)
class Work:
    """Groups in the order in which the environment gives them, by the tokens of their replies."""

    groups: Sequence[Sequence[int]]
    # The longest reply of each group, as an earlier epoch of its task lets expect it.
    expected: Sequence[int]
    groups_per_step: int
    max_staleness: int

    @property
    def num_steps(self) -> int:
        """The steps for which there are groups, with a reserve for those that are held back."""
        return len(self.groups) // self.groups_per_step - 4 * (self.max_staleness + 1)


@dataclass(frozen=True)
class Schedule:
    """When and where groups start, and which replies get the next token; the default is ours."""

    # Most episodes of a server at one time; None: its places.
    max_episodes: int | None = None
    # Whether nothing is leased while a newer version is made; the controller leases.
    fresh: bool = False
    # While a batch waits for groups that are due, only their replies get tokens.
    due_first: bool = False
    # Share of the groups that count as long. They start together, in the first `pulse` of every
    # 2 * max_staleness + 1 versions, and others overtake them, at most `groups_per_step` of them.
    long_share: float = 0.0
    pulse: int = 1
    # Whether the lengths are known, and not those of an earlier epoch.
    known: bool = True


def ceiling_s(machines: Machines, work: Work) -> float:
    """Returns the seconds of a step of the slower fleet alone."""
    training_s = machines.training_s + machines.publish_s
    return max(training_s, _tokens_a_step(work) / machines.tokens_per_s)


def bound_s(machines: Machines, work: Work) -> float:
    """Returns seconds of a step that no schedule undercuts which drops nothing and keeps turns.

    Groups of batch j start with version j - max_staleness at the earliest, and are trained by step
    j + max_staleness at the latest. In these 2 * max_staleness + 1 steps some engine makes as many
    steps as the longest reply of the batch has tokens. Batches so far apart share no step, and each
    engine's step costs `step_s`, beside `request_s` for each token of all replies.
    """
    span = 2 * work.max_staleness + 1
    # The most engine steps that batches `span` apart need, by number of batches.
    most = [0]
    for first in range(0, len(work.groups), work.groups_per_step):
        longest = max(itertools.chain(*work.groups[first : first + work.groups_per_step]))
        most.append(max(most[-1], most[max(len(most) - span, 0)] + longest))
    engine_steps = most[-1] / (len(most) - 1)
    busy_s = machines.request_s * _tokens_a_step(work) + machines.step_s * engine_steps
    return max(ceiling_s(machines, work), busy_s / machines.num_servers)


def _tokens_a_step(work: Work) -> float:
    return sum(map(sum, work.groups)) / len(work.groups) * work.groups_per_step


class OrderedTasks(EnvironmentBook):
    """Environments whose next task is the next group of the work; long ones may wait."""

    def __init__(self, work: Work, schedule: Schedule) -> None:
        super().__init__(seed=0, max_failed_groups=3)
        entry = self.add(
            environment_pb2.EnvironmentSpec(
                name="e", weight=1.0, purpose=trajectory_pb2.EPISODE_PURPOSE_TRAINING
            )
        )
        for server in range(_MOST_SERVERS):
            self.loaded("e", key_of(server), len(work.groups))
        assert entry.is_ready
        self.version = 0
        self._work, self._schedule = work, schedule
        self._longest = [max(g) for g in work.groups] if schedule.known else list(work.expected)
        place = min(int(len(self._longest) * (1.0 - schedule.long_share)), len(self._longest) - 1)
        self._long = sorted(self._longest)[place] if schedule.long_share else math.inf
        self._held: list[int] = []
        self._next = 0

    def next_task(self, entry: EnvironmentEntry) -> tuple[int, int]:
        """The next group, or the first that was held back, if it may start now."""
        most = self._work.groups_per_step
        together = self.version % (2 * self._work.max_staleness + 1) < self._schedule.pulse
        if self._held and (together or len(self._held) >= most):
            return self._held.pop(0), 0
        while not together and self._longest[self._next] >= self._long:
            self._held.append(self._next)
            self._next += 1
            if len(self._held) >= most:
                return self._held.pop(0), 0
        self._next += 1
        return self._next - 1, 0


_MOST_SERVERS = 64


def key_of(server: int) -> ServerKey:
    """The key of a server by its number."""
    return ServerKey(ServerId(f"s{server}"), server)


@dataclass
class _Engine:
    """The remaining tokens of each reply that a server runs, by group and member."""

    remaining: dict[tuple[GroupId, int], float] = field(default_factory=dict)

    def running(self, due: frozenset[GroupId]) -> list[tuple[GroupId, int]]:
        """The replies that get tokens: those of `due` groups, or all if there are none."""
        chosen = [name for name in self.remaining if name[0] in due] if due else []
        return chosen or list(self.remaining)


@dataclass(frozen=True)
class Result:
    """Means of the steps that count."""

    step_s: float
    # Share of the time in which the trainer waits for groups.
    waiting_share: float
    # Share of the time in which it waits although enough other groups are complete.
    held_up_share: float
    open_episodes: float
    tokens_per_s: float
    # Largest lag of a trained group: its step less the version under which it was leased.
    longest_wait_steps: int


class Simulation:
    """One run; `run` returns its result. The trainer waits, trains, publishes, and waits again."""

    def __init__(self, machines: Machines, work: Work, schedule: Schedule) -> None:
        self._machines, self._work, self._schedule = machines, work, schedule
        self._book = LeaseBook(
            groups_per_step=work.groups_per_step,
            group_size=len(work.groups[0]),
            max_staleness=work.max_staleness,
            num_steps=10**9,
            attempts_per_lease=1,
        )
        self._tasks = OrderedTasks(work, schedule)
        self._engines = [_Engine() for _ in range(machines.num_servers)]
        places = schedule.max_episodes or machines.max_episodes
        self._sessions = [_session(server, places) for server in range(machines.num_servers)]
        self._now_s = self._paused_until_s = 0.0
        # The end of what the trainer does; infinite while it waits for a batch.
        self._until_s, self._trains = math.inf, False
        self._due: frozenset[GroupId] = frozenset()
        # Whether a batch or a lease may have become possible since the last attempt.
        self._may_form = self._may_lease = True
        self._ends: list[tuple[float, float, float, int]] = []
        self._held_up_s = self._episode_s = 0.0
        self._trained_tokens = self._longest_wait_steps = 0

    def run(self, num_steps: int | None = None) -> Result:
        """Simulates the steps for which there is work, at most `num_steps`."""
        num_steps = min(num_steps or self._work.num_steps, self._work.num_steps)
        while len(self._ends) < num_steps:
            if self._may_form and not self._is_busy:
                self._form()
            if self._may_lease and self._has_room:
                self._lease()
            self._advance()
        first, last = self._ends[WARMUP_STEPS], self._ends[-1]
        wall_s, held_up_s, episode_s, tokens = (b - a for a, b in zip(first, last, strict=True))
        step_s = wall_s / (len(self._ends) - 1 - WARMUP_STEPS)
        busy_s = self._machines.training_s + self._machines.publish_s
        return Result(
            step_s=step_s,
            waiting_share=1 - busy_s / step_s,
            held_up_share=held_up_s / wall_s,
            open_episodes=episode_s / wall_s,
            tokens_per_s=tokens / wall_s,
            longest_wait_steps=self._longest_wait_steps,
        )

    @property
    def _is_busy(self) -> bool:
        return self._until_s < math.inf

    @property
    def _has_room(self) -> bool:
        sizes = zip(self._sessions, self._engines, strict=True)
        room = max(session.hello.max_episodes - len(e.remaining) for session, e in sizes)
        return room >= self._book.group_size

    def _form(self) -> None:
        self._may_form = False
        batch = self._book.take_batch()
        if batch is None:
            is_held_up = self._book.has_whole_batch
            self._due = frozenset(g.group_id for g in self._book.due()) if is_held_up else _NONE
            return
        self._due = _NONE
        for group in batch:
            lag = self._book.step - 1 - (group.deadline_step - self._work.max_staleness)
            self._longest_wait_steps = max(self._longest_wait_steps, lag)
        self._may_lease = True
        self._trained_tokens += sum(sum(self._work.groups[group.task_index]) for group in batch)
        self._until_s, self._trains = self._now_s + self._machines.training_s, True

    def _lease(self) -> None:
        if self._schedule.fresh and self._is_busy:
            return
        leases = NewLeases(
            self._book,
            self._tasks,
            rooms(self._sessions, self._book, {}),
            [],
            num_episodes=10**9,
        )
        while isinstance(grant := leases.next(), Grant):
            group = grant.group
            engine = self._engines[grant.session.key.epoch]
            for member, length in enumerate(self._work.groups[group.task_index]):
                engine.remaining[group.group_id, member] = float(length)
        self._may_lease = grant is LeaseWait.SLOTS

    def _advance(self) -> None:
        """Goes to the next end of a reply or of the trainer's work."""
        due = self._due if self._schedule.due_first else _NONE
        start_s = max(self._now_s, self._paused_until_s)
        runs, end_s = [], self._until_s
        for engine in self._engines:
            names = engine.running(due)
            runs.append((engine, names))
            if names:
                least = min(map(engine.remaining.__getitem__, names))
                end_s = min(end_s, start_s + least * self._machines.decoding_s(len(names)))
        assert end_s < math.inf, "nothing runs, and the trainer waits"
        self._episode_s += (end_s - self._now_s) * sum(len(e.remaining) for e in self._engines)
        self._held_up_s += (end_s - self._now_s) if self._due else 0.0
        for engine, names in runs:
            if names:
                tokens = max(end_s - start_s, 0.0) / self._machines.decoding_s(len(names))
                self._decode(engine, names, tokens)
        self._now_s = end_s
        if self._now_s >= self._until_s:
            self._trainer_ends()

    def _decode(self, engine: _Engine, names: list[tuple[GroupId, int]], tokens: float) -> None:
        remaining = engine.remaining
        for name in names:
            remaining[name] = left = remaining[name] - tokens
            if left < 1e-6:
                del remaining[name]
                holder = self._book.groups[name[0]].holder
                assert holder is not None
                reply = dataclasses.replace(
                    _REPLY, group_id=name[0], member=name[1], server_epoch=holder.epoch
                )
                self._may_form |= self._book.add(reply) is Fate.COMPLETED_GROUP

    def _trainer_ends(self) -> None:
        if self._trains:
            self._until_s, self._trains = self._now_s + self._machines.publish_s, False
            self._paused_until_s = self._until_s
            return
        self._until_s = math.inf
        self._may_form = self._may_lease = True
        self._tasks.version += 1
        for session in self._sessions:
            session.version = PolicyVersion(0, self._tasks.version)
        self._ends.append((self._now_s, self._held_up_s, self._episode_s, self._trained_tokens))


_NONE: frozenset[GroupId] = frozenset()


def _session(server: int, places: int) -> ServerSession:
    """What a lease pass looks at of a server."""
    hello = SimpleNamespace(max_episodes=places)
    facts = {"key": key_of(server), "hello": hello, "version": PolicyVersion(0, 0)}
    return cast(ServerSession, SimpleNamespace(**facts))


def lognormal(
    num_groups: int,
    seed: int,
    *,
    group_size: int = 16,
    by_task: float = 0.0,
    num_tasks: int = 300,
    median: float = 96.0,
    sigma: float = 0.8326,
    longest: int = 1024,
) -> tuple[list[list[int]], list[int]]:
    """Returns the lengths of groups, and the longest reply of each in earlier epochs of its task.

    `by_task` is the share of the variance that lies between tasks; the rest is between replies.
    """
    drawn = random.Random(seed)
    task_values = [drawn.gauss(0.0, 1.0) for _ in range(num_tasks)]

    def group(task: int) -> list[int]:
        value = math.sqrt(by_task) * task_values[task]
        values = [value + math.sqrt(1.0 - by_task) * drawn.gauss(0, 1) for _ in range(group_size)]
        return [max(1, min(longest, round(median * math.exp(sigma * v)))) for v in values]

    seen = [max(group(task)) for task in range(num_tasks)]
    groups, expected = [], []
    order: list[int] = []
    for _ in range(num_groups):
        if not order:
            order = drawn.sample(range(num_tasks), num_tasks)
        task = order.pop()
        groups.append(group(task))
        expected.append(seen[task])
        seen[task] = max(groups[-1])
    return groups, expected


def stratified(
    num_groups: int,
    *,
    group_size: int = 16,
    median: float = 96.0,
    sigma: float = 0.8326,
    longest: int = 1024,
) -> list[list[int]]:
    """Returns the lengths of groups in which each has its share of the long tail."""
    places = [reply_length(place, median, sigma, longest) for place in range(4096)]
    replies = itertools.cycle(places)
    return [list(itertools.islice(replies, group_size)) for _ in range(num_groups)]
