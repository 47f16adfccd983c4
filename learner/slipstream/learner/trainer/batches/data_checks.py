"""What in the data of a batch cannot be trained: pure functions, equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from slipstream.core.errors import UntrainableBatch
from slipstream.core.types import Trajectory
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.packing import round_up
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
from slipstream.protocol.bounds import largest
from slipstream.v1 import trajectory_pb2

MAX_TOLD = 3
# The protocol's bound: larger rewards are refused before a batch, but older journals may hold some.
LARGEST_REWARD = largest(trajectory_pb2.Trajectory, "reward")


def untrainable(batch: Batch, indices: Sequence[int], cause: str) -> UntrainableBatch:
    """The error that names the trajectories of these sequences, the first few in its message."""
    owners = dict.fromkeys(batch.owners[index] for index in indices)
    ids = [batch.trajectories[owner].trajectory_id for owner in owners]
    more = f" and {len(ids) - MAX_TOLD} more" if len(ids) > MAX_TOLD else ""
    told = f" ({', '.join(ids[:MAX_TOLD])}{more})" if ids else ""
    return UntrainableBatch(f"{cause}{told}", ids)


def check_data(batch: Batch, *, max_tokens: int, multiple: int, vocab_size: int) -> None:
    """UntrainableBatch for a batch without a sampled token, or values that no step can take.

    Sequences are padded to a `multiple` of tokens, and fit a micro batch of `max_tokens` then.
    """
    trajectories = batch.trajectories
    if not sum(trajectory.num_sampled_tokens for trajectory in trajectories):
        raise untrainable(batch, range(len(batch.owners)), "no trajectory has a sampled token")
    sizes = [round_up(length, multiple) for length in batch.lengths()]
    long = [index for index, size in enumerate(sizes) if size > max_tokens]
    if long:
        raise untrainable(
            batch,
            long,
            f"a sequence of {max(sizes)} tokens does not fit learner.micro_batch_tokens, "
            f"{max_tokens} for each sequence",
        )
    tokens = [int(trajectory.token_ids.max(initial=0)) for trajectory in trajectories]
    strange = [index for index, owner in enumerate(batch.owners) if tokens[owner] >= vocab_size]
    if strange:
        raise untrainable(
            batch, strange, f"token {max(tokens)} is outside the vocabulary of {vocab_size}"
        )


def check_references(batch: Batch, *, top_k: int, vocab_size: int) -> None:
    """UntrainableBatch for a trajectory without `top_k` likely tokens of the served reference."""

    def fits(trajectory: Trajectory) -> bool:
        found = trajectory.reference
        return (
            found is not None
            and found.top_k == top_k
            and int(found.top_ids.max(initial=0)) < vocab_size
        )

    faulty = [
        index for index, owner in enumerate(batch.owners) if not fits(batch.trajectories[owner])
    ]
    if faulty:
        raise untrainable(
            batch,
            faulty,
            f"a trajectory lacks log-probabilities of reference.server with top_k {top_k} and a "
            f"vocabulary of {vocab_size}",
        )


def check_advantages(batch: Batch, sequences: Sequence[TrainingSequence]) -> None:
    """UntrainableBatch when rewards are so far apart that an advantage is not finite.

    One reward may spoil all advantages: where some are too large, only these are named.
    """
    faulty = [
        index
        for index, sequence in enumerate(sequences)
        if not np.isfinite(sequence.advantages).all()
    ]
    if faulty:
        rewards = batch.rewards()[batch.owners]
        large = [index for index in faulty if abs(rewards[index]) > LARGEST_REWARD]
        least, most = rewards[faulty].min(), rewards[faulty].max()
        cause = f"advantages are not finite, of rewards from {least:g} to {most:g}"
        raise untrainable(batch, large or faulty, cause)
