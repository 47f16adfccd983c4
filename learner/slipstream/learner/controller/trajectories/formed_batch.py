"""The groups of one step, as the journal and the trainer get them, with counts and statistics.

Only the controller computes statistics of trajectories; the trainer reports only statistics of the
training.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message
from slipstream.core.errors import ProtocolError
from slipstream.core.settings.config import Config
from slipstream.core.types import IGNORED, GroupId, PolicyVersion, Status, Trajectory
from slipstream.learner.algorithms.filters import unequal_rewards
from slipstream.learner.algorithms.functions import episode_sides
from slipstream.learner.controller.leasing.groups import Group, sampled_tokens
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.batch_files import BatchContents
from slipstream.learner.controller.records.journal import tokens_by_server
from slipstream.protocol.codec import (
    experts_to_pb,
    passes_digest,
    trajectory_from_pb,
    trajectory_to_pb,
)
from slipstream.v1 import trainer_pb2, trajectory_pb2

# Largest number of groups that a message names; further groups are only counted.
MAX_TOLD_GROUPS = 5

# Trajectories of a batch travel in messages of about this size.
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class SetAside:
    """A batch that is not trained: `groups` have ended, `put_back` wait for another batch."""

    batch: FormedBatch
    groups: tuple[Group, ...]
    put_back: tuple[Group, ...]
    cause: str
    # The party that set the batch aside: "trainer" or "user".
    by: str

    @classmethod
    def of(cls, batch: FormedBatch, named: Collection[str], cause: str, *, by: str) -> SetAside:
        """Sets the `named` groups aside, or all; raises ProtocolError for one of another batch."""
        there = {group.group_id for group in batch.groups}
        strange = [name for name in named if name not in there]
        if strange:
            raise ProtocolError(
                f"batch {batch.batch_id} of step {batch.version} has no group {strange[0]}; "
                f"it has {', '.join(sorted(there))}"
            )
        group_ids = set(named) or there
        return cls(
            batch=batch,
            groups=tuple(g for g in batch.groups if g.group_id in group_ids),
            put_back=tuple(g for g in batch.groups if g.group_id not in group_ids),
            cause=cause,
            by=by,
        )

    @property
    def trajectories(self) -> list[Trajectory]:
        return _trajectories(self.groups)

    @property
    def waiting(self) -> list[Trajectory]:
        return _trajectories(self.put_back)

    def record(self) -> kinds.BatchSetAside:
        """Returns the journal record; `put_back` has its groups' tasks and seeds."""
        return kinds.BatchSetAside(
            step=self.batch.step,
            batch_id=self.batch.batch_id,
            by=self.by,
            cause=self.cause,
            groups=[(g.group_id, g.environment, g.task_index) for g in self.groups],
            put_back=[(g.group_id, g.environment, g.task_index, g.seed) for g in self.put_back],
            ids=[trajectory.trajectory_id for trajectory in self.trajectories],
            tokens=sampled_tokens(self.trajectories),
            put_back_trajectories=len(self.waiting),
            put_back_tokens=tokens_by_server(self.waiting),
        )

    def describe(self) -> str:
        """Returns the groups that were set aside and the cause as one line of text."""
        begin = f"batch {self.batch.batch_id} of step {self.batch.version} is set aside: "
        if self.batch.given is not None:
            return f"{begin}{self.cause}; the client that ordered the step is told"
        tasks = Counter(group.environment for group in self.groups)
        groups_text = ", ".join(
            f"{group.group_id} (environment {group.environment}, task {group.task_index})"
            for group in self.groups[:MAX_TOLD_GROUPS]
        )
        more = len(self.groups) - MAX_TOLD_GROUPS
        if more > 0:
            rest = ", ".join(f"{count} of {name}" for name, count in sorted(tasks.items()))
            groups_text += f" and {more} more, in all {rest}"
        rest_text = f"; its other {len(self.put_back)} groups stay" if self.put_back else ""
        return f"{begin}{self.cause}; never trained: {groups_text}{rest_text}"


@dataclass(frozen=True)
class Trained:
    """The result of a batch that the trainer has trained."""

    batch: FormedBatch
    # The version of the weights that the trainer made.
    version: PolicyVersion
    # Whether the journal held the step already.
    again: bool


def _trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.in_order()]


@dataclass(frozen=True)
class StepOrder:
    """A step that a client orders, and the passes whose gradients it takes."""

    message: trainer_pb2.GivenStep
    passes: tuple[trainer_pb2.Pass, ...] = ()
    # Set when the journal may have it; None: at once.
    after: asyncio.Event | None = field(default=None, compare=False)

    @property
    def id(self) -> str:
        """The client's name for it."""
        return self.message.id

    @classmethod
    def from_contents(cls, contents: BatchContents) -> StepOrder | None:
        """Returns the order in a recorded batch, or None if it has groups in its place."""
        header_step = contents.header.given
        return cls(header_step, tuple(contents.passes)) if header_step.WhichOneof("step") else None


@dataclass(frozen=True)
class FormedBatch:
    """The complete groups of one step, in the order of their leases."""

    # Number of the version that the step starts from, as in the journal and the protocol.
    step: int
    batch_id: str
    groups: tuple[Group, ...]
    # The step that a client orders, in place of groups; None if the groups are trained.
    given: StepOrder | None = None
    # Seats that rounding owes to environments after the batch, by name.
    owed: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def version(self) -> int:
        """The version that the step makes, from 1; texts for people use this number."""
        return self.step + 1

    @property
    def trajectories(self) -> list[Trajectory]:
        return _trajectories(self.groups)

    @property
    def header(self) -> trainer_pb2.BatchHeader:
        """The message with size and id of the batch, which precedes its trajectories."""
        return trainer_pb2.BatchHeader(
            step=self.step,
            batch_id=self.batch_id,
            num_groups=len(self.groups),
            num_trajectories=sum(len(group.finished) for group in self.groups),
            given=None if self.given is None else self.given.message,
        )

    @property
    def passes(self) -> Sequence[trainer_pb2.Pass]:
        """The passes whose gradients a client's step takes."""
        return () if self.given is None else self.given.passes

    @property
    def contents(self) -> BatchContents:
        """The batch as messages for the journal, each made when it is read."""
        return _Encoded(self)

    @functools.cached_property
    def token_lags(self) -> Counter[int]:
        """Number of sampled tokens for each lag, in versions."""
        lags: Counter[int] = Counter()
        for trajectory in self.trajectories:
            for span in trajectory.version_spans:
                lags[self.step - span.version.step] += span.length
        return lags

    @functools.cached_property
    def num_with_several_versions(self) -> int:
        """Number of trajectories whose tokens were sampled by more than one version."""
        return sum(
            len({span.version for span in trajectory.version_spans}) > 1
            for trajectory in self.trajectories
        )


@dataclass(frozen=True)
class _Encoded:
    """A formed batch as `BatchContents`; nothing of it is held twice."""

    batch: FormedBatch

    @property
    def header(self) -> trainer_pb2.BatchHeader:
        return self.batch.header

    @property
    def trajectories(self) -> Iterator[trajectory_pb2.Trajectory]:
        return map(trajectory_to_pb, self.batch.trajectories)

    @property
    def passes(self) -> Sequence[trainer_pb2.Pass]:
        return self.batch.passes


def from_contents(contents: BatchContents) -> FormedBatch:
    """Returns the batch that was encoded as `contents`, of which it holds one message at a time."""
    header = contents.header
    groups: dict[GroupId, Group] = {}
    for trajectory in map(trajectory_from_pb, contents.trajectories):
        group = groups.get(trajectory.group_id)
        if group is None:
            group = groups[trajectory.group_id] = Group(
                group_id=trajectory.group_id,
                environment=trajectory.environment,
                task_index=trajectory.task_index,
                seed=trajectory.seed,
                purpose=trajectory.purpose,
                size=0,
                deadline_step=header.step,
                holder=None,
            )
        group.finished[trajectory.member] = trajectory
    for group in groups.values():
        group.size = max(group.finished) + 1
        group.fail_all_but(group.finished)
    return FormedBatch(
        step=header.step,
        batch_id=header.batch_id,
        groups=tuple(groups.values()),
        given=StepOrder.from_contents(contents),
    )


def chunks(
    batch: FormedBatch, held: Collection[bytes] = (), *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[trainer_pb2.TrajectoryChunk]:
    """Yields the trajectories, or the passes, in messages of about `chunk_bytes`.

    Each has at least one. The recorded experts follow all trajectories: with their lengths a rank
    knows which of them it trains. Passes that are among `held`, as the trainer tells, come by name
    alone.
    """
    chunk = trainer_pb2.TrajectoryChunk()
    num_bytes = 0
    for name, message in _chunked(batch, held):
        size = message.ByteSize()
        if num_bytes and num_bytes + size > chunk_bytes:
            yield chunk
            chunk = trainer_pb2.TrajectoryChunk()
            num_bytes = 0
        getattr(chunk, name).append(message)
        num_bytes += size
    yield chunk


def _chunked(batch: FormedBatch, held: Collection[bytes]) -> Iterator[tuple[str, Message]]:
    """Yields the contents of all chunks in order, each with the name of its field there."""
    order = batch.given
    if order is not None:
        names = [client_pass.id for client_pass in order.passes]
        is_held = passes_digest(order.message.adapter.name, names) in held
        for client_pass in order.passes:
            yield "passes", trainer_pb2.Pass(id=client_pass.id) if is_held else client_pass
        return
    for trajectory in batch.trajectories:
        yield "trajectories", trajectory_to_pb(trajectory, with_experts=False)
    for place, trajectory in enumerate(batch.trajectories):
        if trajectory.routed_experts is not None:
            yield "experts", experts_to_pb(trajectory.routed_experts, place)


# Largest number of named branches of an episode, and of its first turns, whose rewards are metrics.
MOST_BRANCHES = 16
MOST_TURNS = 8
_EQUAL = "equal_rewards_fraction"


def batch_statistics(batch: FormedBatch) -> dict[str, float]:
    """Returns statistics by their names in docs/metrics.md; of a client's step only its passes."""
    if batch.given is not None:
        return {"passes": float(len(batch.given.passes))}
    trajectories = batch.trajectories
    lags = batch.token_lags
    num_sampled = batch.token_lags.total()
    rewards = [t.reward for t in trajectories]
    sizes = [len(t.token_ids) for t in trajectories]
    replies = [length for t in trajectories for length in t.run_lengths[1::2]]
    return {
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "lag_mean": sum(lag * n for lag, n in lags.items()) / max(1, num_sampled),
        "lag_max": float(max(lags, default=0)),
        "trajectories_with_several_versions": float(batch.num_with_several_versions),
        "num_tokens": float(sum(sizes)),
        "prompt_tokens_mean": statistics.fmean(t.run_lengths[0] for t in trajectories),
        "reply_tokens_mean": num_sampled / max(1, len(replies)),
        "reply_tokens_max": float(max(replies, default=0)),
        "episode_tokens_mean": statistics.fmean(sizes),
        "episode_tokens_max": float(max(sizes)),
        "turns_mean": statistics.fmean(t.num_turns for t in trajectories),
        "branches_mean": statistics.fmean(len(t.sequences) for t in trajectories),
        "truncated_fraction": statistics.fmean(t.status is Status.TRUNCATED for t in trajectories),
        "generation_s_mean": statistics.fmean(t.generation_s for t in trajectories),
        "environment_s_mean": statistics.fmean(t.environment_s for t in trajectories),
    }


def environment_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns means of rewards, of branches' own rewards and of metrics, for each environment.

    In an environment of several turns there are those of its first turns' rewards, too.
    """
    episodes: dict[str, list[Mapping[str, float]]] = {}
    of_turns = [trajectory.turn_rewards()[:MOST_TURNS] for trajectory in trajectories]
    several = {t.environment for t, turns in zip(trajectories, of_turns, strict=True) if turns[1:]}
    for trajectory, turns in zip(trajectories, of_turns, strict=True):
        branch_rewards = {
            b.name: b.reward for b in trajectory.branches if b.name and b.reward is not None
        }
        measured = {
            f"branch_rewards/{name}": branch_rewards[name]
            for name in sorted(branch_rewards)[:MOST_BRANCHES]
        }
        measured |= trajectory.metrics
        if trajectory.environment in several:
            measured |= {f"turn_rewards/{n}": reward for n, reward in enumerate(turns, 1)}
        measured["reward"] = trajectory.reward
        episodes.setdefault(trajectory.environment, []).append(measured)
    return {
        f"{environment}/{name}": mean
        for environment, measured in sorted(episodes.items())
        for name, mean in means_of_metrics(measured).items()
    }


def means_of_metrics(episodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns each metric's mean over the `episodes` that have it; over all if it is ignored."""
    values: dict[str, list[float]] = {}
    for name, value in (item for metrics in episodes for item in metrics.items()):
        values.setdefault(name, []).append(value)
    return {
        name: sum(numbers) / len(episodes)
        if name.startswith(IGNORED)
        else statistics.fmean(numbers)
        for name, numbers in sorted(values.items())
    }


def equal_rewards(groups: Sequence[Sequence[Trajectory]], config: Config) -> dict[str, float]:
    """Returns the fraction of groups of equal rewards, in all and for each environment.

    The rewards are the environment's: a penalty makes no two of them different.
    """
    equalities: dict[str, list[bool]] = {}
    for group in groups:
        equalities.setdefault(group[0].environment, []).append(has_equal_rewards(group, config))
    return {
        _EQUAL: statistics.fmean(
            is_equal for are_equal in equalities.values() for is_equal in are_equal
        ),
        **{
            f"{name}/{_EQUAL}": statistics.fmean(are_equal)
            for name, are_equal in sorted(equalities.items())
        },
    }


def has_equal_rewards(group: Sequence[Trajectory], config: Config) -> bool:
    """Whether the environment's rewards of a group are equal, within each side of its episodes."""
    sides = [side for episode in episode_sides(group, config) for side in episode.values()]
    return not unequal_rewards(sides)
