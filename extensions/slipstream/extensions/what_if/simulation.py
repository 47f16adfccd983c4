"""A run in simulated time: the controller's own lease book, with counted engines and trainer.

Pure: no clock, no I/O. An engine's step takes `step_s + reply_s * n` with n running replies and
gives each of them one token. An episode holds its place from its lease on; before its tokens it
spends `rest_s` elsewhere, in its environment and on its way. The trainer waits for a batch, is busy
with it, and then has a new version, for which engines pause. Queue, evaluations and failures are
left out.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from slipstream.core.group_sizes import GroupSizes
from slipstream.core.types import (
    GroupId,
    PolicyVersion,
    Purpose,
    ServerId,
    Status,
    Trajectory,
    VersionSpan,
)
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.leasing.shares import Mixture
from slipstream.learner.controller.servers.session import ServerKey

# An ended episode for the lease book; each copy has its own group, member and server.
ENDED = Trajectory(
    run_id="",
    group_id=GroupId(""),
    member=0,
    attempt=0,
    server_id=ServerId(""),
    server_epoch=0,
    environment="",
    task_index=0,
    seed=0,
    purpose=Purpose.TRAINING,
    status=Status.COMPLETED,
    token_ids=np.zeros(2, dtype=np.uint32),
    run_lengths=(1, 1),
    behavior_logprobs=np.zeros(1, dtype=np.float32),
    version_spans=(VersionSpan(1, PolicyVersion(0, 0)),),
    failure=None,
    will_retry=False,
    reward=0.0,
    metrics={},
    num_turns=1,
    generation_s=0.0,
    environment_s=0.0,
    prompt_text="",
    reply_text="",
    routed_experts=None,
    branches=(),
    is_given=False,
    reference=None,
    images=(),
    image_places=(),
    adapter="",
    max_reply_tokens=0,
    expected_answer="",
    prompt_logprobs=b"",
    kept_tokens=b"",
    judged_lease=0,
    teacher_prompt=b"",
)
# Share of the steps that are left out of the means: at first nothing waits.
WARM_UP = 0.25


@dataclass(frozen=True)
class Episode:
    """One measured episode: its sampled tokens, and its seconds outside the engine."""

    tokens: int
    rest_s: float


@dataclass(frozen=True)
class EngineSpeed:
    """The seconds of an engine's step, and of each reply that runs in it."""

    step_s: float
    reply_s: float

    def decoding_s(self, num_running: int) -> float:
        """Returns the seconds of a step with so many running replies."""
        return self.step_s + self.reply_s * num_running


@dataclass(frozen=True)
class FleetSizes:
    """The sizes of a run that predictions may change."""

    num_servers: int
    max_episodes: int
    groups_per_step: int
    max_staleness: int


@dataclass(frozen=True)
class Work:
    """What was measured of a run; groups and steps are repeated in this order."""

    groups: Sequence[Sequence[Episode]]
    # The groups of a measured step, and the seconds of each step in which the trainer does not wait
    # for groups: of training, which grow with the groups, and of all else.
    groups_per_step: int
    training_s: Sequence[float]
    other_s: Sequence[float]
    pause_s: float

    @property
    def group_size(self) -> int:
        return max(map(len, self.groups))


@dataclass(frozen=True)
class Prediction:
    """Means of the steps behind the warm-up."""

    step_s: float
    tokens_per_s: float
    lag_mean: float
    # Share of the trainer's time that it waits for groups, and of the servers' without a reply.
    trainer_waits: float
    servers_idle: float
    # Seconds in the engine of each ended episode, with its tokens.
    generation: tuple[tuple[int, float], ...]


@dataclass
class _Reply:
    """A reply that runs on an engine until the engine's progress reaches `ends_at` tokens."""

    group: Group
    member: int
    tokens: int
    began_s: float
    # Sum over its tokens of the version that sampled them.
    version_tokens: float = 0.0
    seen_tokens: float = 0.0


@dataclass
class _Engine:
    """One server. All running replies get tokens at one pace, so one count serves all."""

    key: ServerKey
    progress: float = 0.0
    # Replies by the progress at which they end.
    running: list[tuple[float, int, _Reply]] = field(default_factory=list)
    # Episodes in their environments, by the time at which they come to the engine.
    resting: list[tuple[float, int, _Reply]] = field(default_factory=list)

    @property
    def num_episodes(self) -> int:
        return len(self.running) + len(self.resting)


class Simulation:
    """One run of `num_steps` steps; `run` returns its means."""

    def __init__(
        self, work: Work, speed: EngineSpeed, fleet: FleetSizes, *, num_steps: int
    ) -> None:
        self._work = work
        self._speed = speed
        self._fleet = fleet
        self._num_steps = num_steps
        self._book = LeaseBook(
            groups_per_step=fleet.groups_per_step,
            group_sizes=GroupSizes(work.group_size),
            max_staleness=fleet.max_staleness,
            # No group is of the last steps, for which fewer are leased.
            num_steps=num_steps + 2 * (fleet.max_staleness + 1),
            attempts_per_lease=1,
        )
        self._engines = [
            _Engine(ServerKey(ServerId(f"s{number}"), number))
            for number in range(fleet.num_servers)
        ]
        self._episodes = itertools.cycle(work.groups)
        more = fleet.groups_per_step / work.groups_per_step
        busy_s = [
            training_s * more + other_s
            for training_s, other_s in zip(work.training_s, work.other_s, strict=True)
        ]
        self._busy_s = itertools.cycle(busy_s)
        self._numbers = itertools.count()
        self._now_s = 0.0
        self._paused_until_s = 0.0
        # The version that servers have, and when the trainer's work on the next one ends.
        self._version = 0
        self._trained_at_s = math.inf
        # Whether a batch or a lease may have become possible since the last attempt.
        self._may_form = True
        self._may_lease = True
        # The ended replies of groups that are not trained yet.
        self._tokens_of: dict[GroupId, list[_Reply]] = {}
        self._waited_s = 0.0
        self._idle_s = 0.0
        self._tokens = 0
        self._lag_tokens = 0.0
        self._generation: list[tuple[int, float]] = []

    def run(self) -> Prediction:
        """Simulates all steps."""
        first = max(1, int(WARM_UP * self._num_steps))
        start: tuple[float, float, float, int, float] | None = None
        while self._version < self._num_steps:
            self._form()
            self._lease()
            ended = self._advance()
            if ended and self._version == first:
                start = self._sums()
                self._generation.clear()
        assert start is not None
        wall_s, waited_s, idle_s, tokens, lag_tokens = (
            end - begin for begin, end in zip(start, self._sums(), strict=True)
        )
        return Prediction(
            step_s=wall_s / (self._num_steps - first),
            tokens_per_s=tokens / wall_s,
            # Sums of parts of tokens are a little beside whole numbers.
            lag_mean=max(0.0, lag_tokens / max(tokens, 1)),
            trainer_waits=waited_s / wall_s,
            servers_idle=idle_s / wall_s / self._fleet.num_servers,
            generation=tuple(self._generation),
        )

    def _sums(self) -> tuple[float, float, float, int, float]:
        return self._now_s, self._waited_s, self._idle_s, self._tokens, self._lag_tokens

    def _form(self) -> None:
        """Takes the next batch if the trainer waits and the lease book has one."""
        if self._trained_at_s < math.inf or not self._may_form:
            return
        self._may_form = False
        step = self._book.step
        # With one environment shares choose the earliest groups and wait for none.
        choice = self._book.choose_batch(Mixture())
        if choice is None:
            return
        batch = self._book.take_batch(choice)
        self._may_lease = True
        for group in batch:
            for reply in self._tokens_of.pop(group.group_id):
                self._tokens += reply.tokens
                self._lag_tokens += step * reply.tokens - reply.version_tokens
        self._trained_at_s = self._now_s + next(self._busy_s)

    def _lease(self) -> None:
        """Leases groups as a pass of the scheduler does: the server with most room comes first."""
        size = self._work.group_size
        if not self._may_lease:
            return
        self._may_lease = False
        while self._book.may_lease(self._version):
            engine = min(self._engines, key=lambda engine: engine.num_episodes)
            if engine.num_episodes + size > self._fleet.max_episodes:
                return
            group = self._book.lease("", 0, 0, engine.key, self._version)
            episodes = next(self._episodes)
            # Members that failed in the run are missing here too.
            group.fail_all_but(range(len(episodes)))
            self._tokens_of[group.group_id] = []
            for member, episode in enumerate(episodes):
                reply = _Reply(group, member, episode.tokens, 0.0)
                arrival_s = self._now_s + episode.rest_s
                heapq.heappush(engine.resting, (arrival_s, next(self._numbers), reply))

    def _advance(self) -> bool:
        """Goes to the next event; returns whether the trainer has made a version."""
        until_s = self._trained_at_s
        for engine in self._engines:
            if engine.resting:
                until_s = min(until_s, engine.resting[0][0])
            if engine.running:
                tokens_left = engine.running[0][0] - engine.progress
                decoding_s = self._speed.decoding_s(len(engine.running))
                started_s = max(self._now_s, self._paused_until_s)
                until_s = min(until_s, started_s + tokens_left * decoding_s)
        assert until_s < math.inf, "nothing runs, and the trainer waits"
        passed_s = until_s - self._now_s
        decoded_s = max(0.0, until_s - max(self._now_s, self._paused_until_s))
        if self._trained_at_s == math.inf:
            self._waited_s += passed_s
        self._now_s = until_s
        for engine in self._engines:
            self._move(engine, decoded_s, passed_s)
        if self._now_s < self._trained_at_s:
            return False
        self._trained_at_s = math.inf
        self._may_form = True
        self._may_lease = True
        for engine in self._engines:
            for _, _, reply in engine.running:
                self._count_versions(engine, reply)
        self._version += 1
        self._paused_until_s = self._now_s + self._work.pause_s
        return True

    def _move(self, engine: _Engine, decoded_s: float, passed_s: float) -> None:
        """Moves an engine on to the present time."""
        if engine.running:
            engine.progress += decoded_s / self._speed.decoding_s(len(engine.running))
        else:
            self._idle_s += passed_s
        while engine.running and engine.running[0][0] <= engine.progress + 1e-9:
            _, _, reply = heapq.heappop(engine.running)
            self._count_versions(engine, reply)
            self._generation.append((reply.tokens, self._now_s - reply.began_s))
            self._finish(reply)
        while engine.resting and engine.resting[0][0] <= self._now_s:
            _, number, reply = heapq.heappop(engine.resting)
            reply.began_s = self._now_s
            reply.seen_tokens = engine.progress
            heapq.heappush(engine.running, (engine.progress + reply.tokens, number, reply))

    def _count_versions(self, engine: _Engine, reply: _Reply) -> None:
        """Counts the tokens since the last look as those of the present version."""
        new_tokens = engine.progress - reply.seen_tokens
        reply.version_tokens += new_tokens * self._version
        reply.seen_tokens = engine.progress

    def _finish(self, reply: _Reply) -> None:
        """Puts the episode into its group."""
        group = reply.group
        assert group.holder is not None
        trajectory = dataclasses.replace(
            ENDED,
            group_id=group.group_id,
            member=reply.member,
            server_epoch=group.holder.epoch,
        )
        self._book.add(trajectory)
        self._tokens_of[group.group_id].append(reply)
        self._may_lease = True
        self._may_form |= group.is_complete
