"""The trajectories of one training step, and checks of their data, equal on every rank."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from slipstream.core.errors import RunFailed, StalenessError, UntrainableBatch
from slipstream.core.models.vision import decoded
from slipstream.core.types import Trajectory
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.planner import round_up
from slipstream.v1 import trainer_pb2

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
