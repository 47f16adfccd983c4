"""Each rank's share of a batch, and a model's outputs for the batch, gathered on all ranks."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from slipstream.core.types import LogprobArray, TokenSequence
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.micro_batch import (
    MicroBatch,
    build_micro_batch,
    build_tree_micro_batch,
    share_of_rank,
    zigzag,
)
from slipstream.learner.trainer.batches.planner import plan_micro_batches, round_up
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
from slipstream.learner.trainer.model.model import ParallelModel
from torch import Tensor

# Function from this replica's micro batches to one tensor [tokens] each on the last pipeline stage,
# and [] on the other stages.
Forward = Callable[[Sequence[MicroBatch]], Sequence[Tensor]]


def batch_outputs(
    model: ParallelModel, batch: Batch, forward: Forward, *, max_tokens: int, width: int = 0
) -> list[LogprobArray]:
    """Returns for each trajectory the outputs that predict its sampled tokens; on every rank.

    Each array is float32 [sampled tokens], or [sampled tokens, width] with a `width`. The output is
    0 for a sampled token that is the first of its sequence, which nothing predicts. The layout of
    `model` must be in force; each replica computes its share. Collective: besides the model's own
    messages, 4 bytes for each output of the batch are summed over all ranks.
    """
    sequences = TrainingSequence.of_trajectories(
        batch.trajectories,
        step=batch.step,
        processor=None if model.vision is None else model.vision.processor,
    )
    found = iter(masked_outputs(model, sequences, forward, max_tokens=max_tokens, width=width))
    return [
        np.concatenate([_with_unpredicted(part, next(found)) for part in trajectory.sequences()])
        for trajectory in batch.trajectories
    ]


def masked_outputs(
    model: ParallelModel,
    sequences: Sequence[TrainingSequence],
    forward: Forward,
    *,
    max_tokens: int,
    width: int = 0,
) -> list[LogprobArray]:
    """Returns for each sequence the float32 outputs where its loss mask is set; on every rank.

    Collective; `width` and the messages between ranks are as in `batch_outputs`.
    """
    ranks = model.ranks
    wholes = _packed(model, sequences, range(len(sequences)), max_tokens=max_tokens)
    outputs = forward([share_of_rank(whole, ranks.cp_rank, ranks.cp_size) for whole in wholes])
    starts = [0, *accumulate(int(sequence.loss_mask.sum()) for sequence in sequences)]
    tail = (width,) if width else ()
    found = torch.zeros((starts[-1], *tail), dtype=torch.float32)
    if ranks.counts:
        for whole, values in zip(wholes, outputs, strict=True):
            bounds = whole.cu_seqlens.tolist()
            # Each context parallel rank has some values; the sum over all ranks completes them.
            row = torch.zeros((bounds[-1], *tail), dtype=torch.float32)
            row[zigzag(bounds, ranks.cp_rank, ranks.cp_size)] = values.float().cpu()
            places = whole.sequence_ids[whole.loss_mask]
            masked = row[whole.loss_mask]
            for place, index in enumerate(whole.indices):
                found[starts[index] : starts[index + 1]] = masked[places == place]
    ranks.sum(found)
    return [found[start:end].numpy() for start, end in pairwise(starts)]


def rank_micro_batches(
    model: ParallelModel,
    sequences: Sequence[TrainingSequence],
    members: Sequence[int],
    *,
    max_tokens: int,
) -> list[MicroBatch]:
    """Returns this rank's share of the sequences at indices `members`, packed into micro batches.

    The layout of `model` must be in force.
    """
    wholes = _packed(model, sequences, members, max_tokens=max_tokens)
    return [share_of_rank(whole, model.ranks.cp_rank, model.ranks.cp_size) for whole in wholes]


def _packed(
    model: ParallelModel,
    sequences: Sequence[TrainingSequence],
    members: Sequence[int],
    *,
    max_tokens: int,
) -> list[MicroBatch]:
    """Returns this replica's micro batches, not yet split over context parallel ranks."""
    ranks, limit = model.ranks, max_tokens * model.ranks.cp_size
    shared = None
    if model.sharing is not None:
        shared = model.sharing.plan(
            sequences,
            members,
            max_tokens=limit,
            dp_size=ranks.dp_size,
            multiple=model.micro_batch_multiple,
            attention_length=model.attention_length,
        )
    if shared is None:
        plan = plan_micro_batches(
            [round_up(len(sequences[index]), model.sequence_multiple) for index in members],
            max_tokens=limit,
            dp_size=ranks.dp_size,
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
            for places in plan[ranks.dp_rank]
        ]
    return [
        build_tree_micro_batch(sequences, bundles, multiple=model.token_multiple)
        for bundles in shared[ranks.dp_rank]
    ]


def _with_unpredicted(part: TokenSequence, found: LogprobArray) -> LogprobArray:
    """Returns `found` with zeros in front for sampled tokens of `part` that nothing predicts."""
    unpredicted = part.sampled.stop - part.sampled.start - len(found)
    return np.concatenate([np.zeros((unpredicted, *found.shape[1:]), dtype=np.float32), found])
