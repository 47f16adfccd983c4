"""Each rank's share of a batch, and a model's outputs for it, gathered on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.context_parallel import share_of_rank, zigzag
from slipstream.learner.trainer.batches.packing import (
    MicroBatch,
    TokenEstimates,
    TrainingSequence,
    build_micro_batch,
    round_up,
)
from slipstream.learner.trainer.batches.planner import plan_micro_batches
from slipstream.learner.trainer.model.model import ParallelModel
from slipstream.protocol.types import LogprobArray, TokenSequence
from torch import Tensor

# Function from this replica's micro batches to one tensor [tokens] each on the last pipeline stage,
# and [] on the other stages.
Forward = Callable[[Sequence[MicroBatch]], Sequence[Tensor]]


def batch_outputs(
    model: ParallelModel, batch: Batch, forward: Forward, *, max_tokens: int
) -> list[LogprobArray]:
    """Returns for each trajectory the outputs that predict its sampled tokens; on every rank.

    Each is float32 [sampled tokens], with 0 for the sampled first token of a sequence, which
    nothing predicts. The
    layout of `model` must be in force; each replica computes its share. Collective: besides the
    model's own messages, it sums 4 bytes for each sampled token of the batch over all ranks.
    """
    nothing = [
        TokenEstimates(np.zeros(trajectory.num_sampled_tokens, dtype=np.float32))
        for trajectory in batch.trajectories
    ]
    sequences = TrainingSequence.of_trajectories(batch.trajectories, nothing, step=batch.step)
    found = iter(masked_outputs(model, sequences, forward, max_tokens=max_tokens))
    return [
        np.concatenate([_sampled_outputs(part, next(found)) for part in trajectory.sequences()])
        for trajectory in batch.trajectories
    ]


def masked_outputs(
    model: ParallelModel,
    sequences: Sequence[TrainingSequence],
    forward: Forward,
    *,
    max_tokens: int,
) -> list[LogprobArray]:
    """Returns for each sequence the float32 outputs at its loss mask; on every rank.

    Collective, with the messages of `batch_outputs`.
    """
    ranks = model.ranks
    wholes = _packed(model, sequences, range(len(sequences)), max_tokens=max_tokens)
    outputs = forward([share_of_rank(whole, ranks.cp_rank, ranks.cp_size) for whole in wholes])
    starts = [0, *accumulate(int(sequence.loss_mask.sum()) for sequence in sequences)]
    found = torch.zeros(starts[-1], dtype=torch.float32)
    if ranks.counts:
        for whole, values in zip(wholes, outputs, strict=True):
            bounds = whole.cu_seqlens.tolist()
            # Each context parallel rank has some values; the sum over all ranks completes them.
            row = torch.zeros(bounds[-1], dtype=torch.float32)
            row[zigzag(bounds, ranks.cp_rank, ranks.cp_size)] = values.float().cpu()
            for part, index in zip(
                itertools.starmap(slice, pairwise(bounds)), whole.indices, strict=False
            ):
                found[starts[index] : starts[index + 1]] = row[part][whole.loss_mask[part]]
    ranks.sum(found)
    return [found[start:end].numpy() for start, end in pairwise(starts)]


def rank_micro_batches(
    model: ParallelModel,
    sequences: Sequence[TrainingSequence],
    members: Sequence[int],
    *,
    max_tokens: int,
) -> list[MicroBatch]:
    """Returns this rank's share of the `members`; the layout of `model` must be in force."""
    wholes = _packed(model, sequences, members, max_tokens=max_tokens)
    return [share_of_rank(whole, model.ranks.cp_rank, model.ranks.cp_size) for whole in wholes]


def _packed(
    model: ParallelModel,
    sequences: Sequence[TrainingSequence],
    members: Sequence[int],
    *,
    max_tokens: int,
) -> list[MicroBatch]:
    """Returns this replica's whole micro batches, which context parallel ranks share."""
    plan = plan_micro_batches(
        [round_up(len(sequences[index]), model.sequence_multiple) for index in members],
        max_tokens=max_tokens * model.ranks.cp_size,
        dp_size=model.ranks.dp_size,
        multiple=model.micro_batch_multiple,
        attention_length=model.attention_length,
    )
    return [
        build_micro_batch(
            sequences,
            [members[place] for place in places],
            multiple=model.token_multiple,
            sequence_multiple=model.sequence_multiple,
        )
        for places in plan[model.ranks.dp_rank]
    ]


def _sampled_outputs(part: TokenSequence, found: LogprobArray) -> LogprobArray:
    unpredicted = part.sampled.stop - part.sampled.start - len(found)
    return np.concatenate([np.zeros(unpredicted, dtype=np.float32), found])
