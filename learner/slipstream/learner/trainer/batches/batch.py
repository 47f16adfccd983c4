"""The trajectories of one training step, how every rank gets them, and checks of their data.

Consumes: the messages of `Next` on rank 0. Produces: an order on every rank, such as a `Batch`.
Waits for: the controller, through rank 0. Unblocked by: a message, or the limit of the call.

A rank holds one message at a time beside what it keeps. All ranks keep tokens, log-probabilities
and rewards of the whole batch, which their advantages need. Recorded experts are a hundred times
as long: they come last, and each rank keeps those of the sequences that it trains.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from slipstream.core.errors import ProtocolError, RunFailed, StalenessError, UntrainableBatch
from slipstream.core.models.images import decoded
from slipstream.core.types import RoutedExperts, Trajectory
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.planner import round_up
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.protocol.bounds import one_line
from slipstream.protocol.codec import experts_elsewhere, experts_in_place, trajectory_from_pb
from slipstream.v1 import trainer_pb2, trajectory_pb2, weights_pb2
from slipstream.v1 import trainer_pb2 as pb

if TYPE_CHECKING:
    from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
    from slipstream.learner.trainer.ranks.parallel import Ranks

# The most trajectories or groups that an error names.
MAX_TOLD = 3


@dataclass(frozen=True)
class Batch:
    """Trajectories of whole groups, in order, that train version `step` into version `step` + 1.

    A trajectory is trained as one sequence, or as one for each of its branches, in the order of
    their tokens.
    """

    step: int
    batch_id: str
    trajectories: tuple[Trajectory, ...]
    # The step that a client orders, and the passes whose gradients it takes, in place of
    # trajectories.
    given: trainer_pb2.GivenStep | None = None
    passes: tuple[trainer_pb2.Pass, ...] = ()
    # The sequences whose recorded experts this rank holds, by index; None: it holds all.
    recorded_here: frozenset[int] | None = None

    @property
    def group_ids(self) -> list[str]:
        return [trajectory.group_id for trajectory in self.trajectories]

    @functools.cached_property
    def owners(self) -> list[int]:
        return [index for index, t in enumerate(self.trajectories) for _ in t.sequences]

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence."""
        parts = [part.tokens for t in self.trajectories for part in t.sequences]
        return [tokens.stop - tokens.start for tokens in parts]

    def recorded_tokens(self) -> tuple[int, int]:
        """Returns how many tokens have recorded experts, and how many could; no last tokens.

        Both count the sequences whose experts this rank holds.
        """
        num_recorded = 0
        num_tokens = 0
        index = 0
        for trajectory in self.trajectories:
            is_recorded = None
            for part in trajectory.sequences:
                if self.recorded_here is None or index in self.recorded_here:
                    num_tokens += max(0, part.tokens.stop - part.tokens.start - 1)
                    if trajectory.routed_experts is not None:
                        if is_recorded is None:
                            is_recorded = trajectory.routed_experts.is_recorded
                        num_recorded += int(np.count_nonzero(is_recorded[part.tokens][:-1]))
                index += 1
        return num_recorded, num_tokens

    def without_experts(self) -> Batch:
        """Returns the batch without its experts, which take most of its memory."""
        trajectories = tuple(replace(t, routed_experts=None) for t in self.trajectories)
        return replace(self, trajectories=trajectories)

    def by_adapter(self, names: Sequence[str]) -> list[tuple[str, Batch]]:
        """Returns (name, batch) of each adapter with trajectories; raises RunFailed for others."""
        for trajectory in self.trajectories:
            if trajectory.adapter not in names:
                raise RunFailed(
                    f"batch {self.batch_id}: {trajectory.trajectory_id} is of adapter "
                    f"{trajectory.adapter!r}, but lora.adapters are {', '.join(names)!r}"
                )
        parts = [(n, tuple(t for t in self.trajectories if t.adapter == n)) for n in names]
        return [(name, replace(self, trajectories=part)) for name, part in parts if part]

    def mini_batches(self, number: int, *, or_fewer: bool = False) -> list[list[int]]:
        """Returns the indices of each mini-batch's sequences: about equal shares of the groups.

        If there are fewer groups than `number`, with `or_fewer` each group is a mini-batch. Without
        `or_fewer` RunFailed is raised.
        """
        groups = list(dict.fromkeys(self.group_ids))
        if or_fewer:
            number = min(number, len(groups))
        if len(groups) < number:
            raise RunFailed(
                f"batch {self.batch_id}: {len(groups)} groups are too few for {number} mini-batches"
            )
        share = {group: place * number // len(groups) for place, group in enumerate(groups)}
        parts: list[list[int]] = [[] for _ in range(number)]
        group_ids = self.group_ids
        for index, owner in enumerate(self.owners):
            parts[share[group_ids[owner]]].append(index)
        return parts


def untrainable(batch: Batch, indices: Sequence[int], cause: str) -> UntrainableBatch:
    """Returns the error `cause`, which names the first trajectories of sequences at `indices`."""
    owners = dict.fromkeys(batch.owners[index] for index in indices)
    ids = [batch.trajectories[owner].trajectory_id for owner in owners]
    more = f" and {len(ids) - MAX_TOLD} more" if len(ids) > MAX_TOLD else ""
    names = f" ({', '.join(ids[:MAX_TOLD])}{more})" if ids else ""
    return UntrainableBatch(f"{cause}{names}", ids)


def check_staleness(batch: Batch, max_staleness: int) -> None:
    """Raises StalenessError if the lag of a token is not between 0 and `max_staleness`."""
    for trajectory in batch.trajectories:
        for span in trajectory.version_spans:
            lag = batch.step - span.version.step
            if span.length and not 0 <= lag <= max_staleness:
                raise StalenessError(
                    f"step {batch.step + 1}: {trajectory.trajectory_id} has tokens of version "
                    f"{span.version}, a lag of {lag}, but it must be between 0 and "
                    f"max_staleness {max_staleness}"
                )


def check_data(
    batch: Batch,
    *,
    max_tokens: int,
    multiple: int,
    vocab_size: int,
) -> None:
    """Raises UntrainableBatch for data that cannot be trained.

    The batch needs a sampled token. A sequence padded to a `multiple` of tokens must fit a micro
    batch of `max_tokens`, and token ids must be below `vocab_size`. The controller has checked the
    rest of each trajectory, such as its reward and its reference.
    """
    trajectories = batch.trajectories
    if not sum(trajectory.num_sampled_tokens for trajectory in trajectories):
        raise untrainable(batch, range(len(batch.owners)), "no trajectory has a sampled token")
    sizes = [round_up(length, multiple) for length in batch.lengths]
    long = [index for index, size in enumerate(sizes) if size > max_tokens]
    if long:
        raise untrainable(
            batch,
            long,
            f"a sequence of {sizes[long[0]]} tokens does not fit learner.micro_batch_tokens, "
            f"{max_tokens} for each sequence",
        )
    strange = [t.token_ids[t.token_ids >= vocab_size] for t in trajectories]
    faulty = [index for index, owner in enumerate(batch.owners) if len(strange[owner])]
    if faulty:
        token = strange[batch.owners[faulty[0]]][0]
        cause = f"token {token} is outside the vocabulary of {vocab_size}"
        raise untrainable(batch, faulty, cause)


def check_pixels(trajectories: Sequence[Trajectory], ranks: Ranks) -> None:
    """Raises UntrainableBatch on all ranks if an image cannot be read; collective."""
    shown_by: dict[bytes, list[str]] = {}
    for trajectory in trajectories:
        for image in {place.image for place in trajectory.image_places}:
            shown_by.setdefault(trajectory.images[image], []).append(trajectory.trajectory_id)
    if not shown_by:
        return
    faults: dict[str, str] = {}
    for data, names in list(shown_by.items())[ranks.rank :: ranks.world_size]:
        try:
            decoded(data)
        except ValueError as error:
            faults |= dict.fromkeys(names, str(error))
    faults_of_ranks = [
        json.loads(faults_of_rank)
        for faults_of_rank in ranks.gather_bytes(json.dumps(faults).encode())
    ]
    causes = {
        name: cause for faults_of_rank in faults_of_ranks for name, cause in faults_of_rank.items()
    }
    faulty = [t.trajectory_id for t in trajectories if t.trajectory_id in causes]
    if faulty:
        raise UntrainableBatch(f"{faulty[0]}: {causes[faulty[0]]}", faulty)


def check_experts(trajectories: Sequence[Trajectory], config: Megatron) -> None:
    """Raises UntrainableBatch if recorded experts do not fit the model of Megatron's `config`."""
    expected = (config.num_layers, config.moe_router_topk, config.num_moe_experts)
    for trajectory in trajectories:
        routed = trajectory.routed_experts
        if routed is None:
            continue
        routed_shape = (*routed.expert_ids.shape[1:], routed.num_experts)
        if routed_shape != expected:
            raise UntrainableBatch(
                f"{trajectory.trajectory_id} has experts of {routed_shape[0]} layers, "
                f"{routed_shape[1]} of {routed_shape[2]} each, but the model has "
                f"{expected[0]} layers, {expected[1]} of {expected[2]}",
                [trajectory.trajectory_id],
            )


def check_advantages(batch: Batch, sequences: Sequence[TrainingSequence]) -> None:
    """Raises UntrainableBatch if an advantage is not finite, as with rewards that are too large."""
    faulty = [
        i for i, sequence in enumerate(sequences) if not np.isfinite(sequence.advantages).all()
    ]
    if faulty:
        rewards = [batch.trajectories[batch.owners[index]].reward for index in faulty]
        cause = f"advantages are not finite, of rewards from {min(rewards):g} to {max(rewards):g}"
        raise untrainable(batch, faulty, cause)


Order: TypeAlias = (
    Batch
    | weights_pb2.PublishOrder
    | pb.StoreOrder
    | pb.Pass
    | pb.SaveOrder
    | pb.StopOrder
    | pb.WaitOrder
)
# Batch without experts -> indices of the sequences whose experts this rank keeps.
Share = Callable[[Batch], Set[int]]
_SINGLE = ("publish", "store", "compute", "save", "stop", "wait")


def on_every_rank(
    directives: Iterable[pb.Directive] | None, ranks: Ranks
) -> Iterator[pb.Directive]:
    """Yields rank 0's `directives` on every rank; the other ranks pass None. Collective."""
    if ranks.world_size == 1:
        assert directives is not None
        yield from directives
        return
    messages = None if directives is None else iter(directives)
    while True:
        data = None
        if messages is not None:
            message = next(messages, None)
            # An order is never empty: an empty message marks the end.
            data = b"" if message is None else message.SerializeToString()
        received = ranks.broadcast_bytes(data)
        if not received:
            return
        yield pb.Directive.FromString(received)


def read_order(directives: Iterable[pb.Directive], share: Share) -> Order:
    """Returns the order in an answer; raises ProtocolError if its messages do not fit together.

    `share` is asked once for a batch with recorded experts.
    """
    messages = iter(directives)
    first = next(messages, None)
    if first is None:
        raise ProtocolError("the controller answered Next without an order")
    kind = first.WhichOneof("directive")
    if kind == "batch":
        try:
            return _read_batch(first.batch, _chunks(messages), share)
        except ProtocolError as error:
            # The message may contain names that nothing has checked.
            batch_id = one_line(first.batch.batch_id, 128)
            raise ProtocolError(one_line(f"batch {batch_id}: {error}", 1000)) from error
    if kind not in _SINGLE:
        raise ProtocolError(f"an answer begins with an order, got {kind}")
    order: Order = getattr(first, kind)
    return order


def _chunks(messages: Iterator[pb.Directive]) -> Iterator[pb.TrajectoryChunk]:
    for message in messages:
        if message.WhichOneof("directive") != "chunk":
            raise ProtocolError("something else than a chunk follows")
        yield message.chunk


def _read_batch(
    header: pb.BatchHeader, chunks: Iterator[pb.TrajectoryChunk], share: Share
) -> Batch:
    trajectories: list[Trajectory] = []
    passes: list[pb.Pass] = []
    first_experts: list[pb.RecordedExperts] = []
    for chunk in chunks:
        trajectories.extend(map(_without_experts, chunk.trajectories))
        passes.extend(chunk.passes)
        if chunk.experts:
            first_experts = [*chunk.experts]
            break
    batch = Batch(
        step=header.step,
        batch_id=header.batch_id,
        trajectories=tuple(trajectories),
        given=header.given if header.HasField("given") else None,
        passes=tuple(passes),
    )
    _check_counts(header, batch)
    if not any(trajectory.routed_experts is not None for trajectory in trajectories):
        if first_experts:
            raise ProtocolError("experts came that no trajectory has announced")
        return batch
    return _with_experts(batch, share(batch), first_experts, chunks)


def _without_experts(message: trajectory_pb2.Trajectory) -> Trajectory:
    announced = experts_elsewhere(message)
    trajectory = trajectory_from_pb(message)
    if announced is None:
        return trajectory
    return dataclasses.replace(trajectory, routed_experts=announced)


def _check_counts(header: pb.BatchHeader, batch: Batch) -> None:
    if len(batch.passes) != header.given.num_passes:
        raise ProtocolError(
            f"{header.given.num_passes} passes were announced, {len(batch.passes)} came"
        )
    num_groups = len(set(batch.group_ids))
    num_trajectories = len(batch.trajectories)
    if (num_groups, num_trajectories) != (header.num_groups, header.num_trajectories):
        raise ProtocolError(
            f"{header.num_groups} groups of {header.num_trajectories} trajectories were "
            f"announced, {num_groups} of {num_trajectories} came"
        )


def _with_experts(
    batch: Batch,
    sequences: Set[int],
    first_experts: Iterable[pb.RecordedExperts],
    chunks: Iterator[pb.TrajectoryChunk],
) -> Batch:
    """Returns the batch with the experts of `sequences`; those of the others are dropped."""
    trajectories = [*batch.trajectories]
    awaited = {p for p, t in enumerate(trajectories) if t.routed_experts is not None}
    trained = {batch.owners[index] for index in sequences}

    def keep(records: Iterable[pb.RecordedExperts]) -> None:
        for record in records:
            place = record.trajectory
            if place not in awaited:
                raise ProtocolError(f"experts of trajectory {place} came twice, or unannounced")
            awaited.remove(place)
            announced = trajectories[place].routed_experts
            if place in trained and announced is not None:
                experts = experts_in_place(record, announced)
                trajectories[place] = dataclasses.replace(
                    trajectories[place], routed_experts=experts
                )

    keep(first_experts)
    for chunk in chunks:
        if chunk.trajectories or chunk.passes:
            raise ProtocolError("trajectories came behind experts")
        keep(chunk.experts)
    if awaited:
        raise ProtocolError(f"the experts of {len(awaited)} trajectories did not come")
    return dataclasses.replace(
        batch, trajectories=tuple(trajectories), recorded_here=frozenset(sequences)
    )


class Contents(Protocol):
    """A recorded batch, whose trajectories can be read twice."""

    @property
    def header(self) -> pb.BatchHeader:
        """The step and the id of the batch, and what a client orders in place of groups."""

    @property
    def trajectories(self) -> Iterable[trajectory_pb2.Trajectory]:
        """The trajectories with their experts."""

    @property
    def passes(self) -> Iterable[pb.Pass]:
        """The passes of a client's step."""


def read_stored(contents: Contents, share: Share) -> Batch:
    """Returns a recorded batch with the experts of this rank's share alone, as `read_order` does.

    Raises ProtocolError if it is damaged.
    """
    header = contents.header
    is_given = header.HasField("given")
    trajectories = map(trajectory_from_pb, contents.trajectories)
    batch = Batch(
        step=header.step,
        batch_id=header.batch_id,
        trajectories=tuple(map(_with_shape, trajectories)),
        given=header.given if is_given else None,
        passes=tuple(contents.passes) if is_given else (),
    )
    if all(trajectory.routed_experts is None for trajectory in batch.trajectories):
        return batch
    sequences = frozenset(share(batch))
    trained = {batch.owners[index] for index in sequences}
    messages = zip(contents.trajectories, batch.trajectories, strict=True)
    trajectories_here = tuple(
        trajectory_from_pb(message) if place in trained else light
        for place, (message, light) in enumerate(messages)
    )
    return dataclasses.replace(batch, trajectories=trajectories_here, recorded_here=sequences)


def _with_shape(trajectory: Trajectory) -> Trajectory:
    """Returns the trajectory with no more than the shape of its experts."""
    experts = trajectory.routed_experts
    if experts is None:
        return trajectory
    shape = RoutedExperts.not_here(experts.expert_ids.shape, experts.num_experts)
    return dataclasses.replace(trajectory, routed_experts=shape)
