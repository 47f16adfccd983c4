"""Packs each rank's share of a batch, and runs it through the pipeline schedule.

Outputs of a model for the whole batch are gathered on all ranks.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
import torch
from slipstream.core.types import LogprobArray, TokenArray, TokenSequence
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.algorithms.loss import TokenLoss
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.micro_batch import (
    MicroBatch,
    build_micro_batch,
    build_tree_micro_batch,
    share_of_rank,
    to_device,
    zigzag,
)
from slipstream.learner.trainer.batches.planner import plan_micro_batches, round_up
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
from slipstream.learner.trainer.model.attention_kernels import log_attention_once
from slipstream.learner.trainer.model.logprobs import (
    Projection,
    top_tokens,
    vocab_parallel_logprobs,
)
from slipstream.learner.trainer.model.model import ParallelModel, Part, TrainedModel
from torch import Tensor

Output = TypeVar("Output")
# (place of the micro batch, micro batch, log-probabilities, entropy) -> loss
LossFunction = Callable[[int, MicroBatch, Tensor, Tensor], TokenLoss]
# (place, micro batch, output of the last stage) -> (sum of the loss, tokens, result)
Finish = Callable[[int, MicroBatch, Tensor], tuple[Tensor, Tensor, Output]]
# Function from this replica's micro batches to one tensor [tokens] each on the last pipeline stage,
# and [] on the other stages.
Forward = Callable[[Sequence[MicroBatch]], Sequence[Tensor]]


def forward_backward(
    model: TrainedModel,
    micro_batches: Sequence[MicroBatch],
    loss: LossFunction,
    *,
    temperature: float,
    entropy_gradient: bool = False,
) -> list[TokenLoss]:
    """Accumulates the gradients of all micro batches, divided by the trained tokens of all ranks.

    Collective. Returns the loss of each micro batch, detached, on the last pipeline stage, and []
    on the other stages. `temperature` applies to tokens that the policy sampled; tokens that an
    environment gave have temperature 1. Set `entropy_gradient` if the loss needs the gradient of
    the entropies.
    """

    def finish(
        place: int, micro_batch: MicroBatch, hidden: Tensor
    ) -> tuple[Tensor, Tensor, TokenLoss]:
        logprobs, entropy = _logprobs(
            hidden[0], model.output_weight, micro_batch.all_targets, rows[place], projection
        )
        found = loss(place, micro_batch, logprobs, entropy)
        kept = dataclasses.replace(found, loss=found.loss.detach())
        return found.loss, found.num_tokens.to(torch.int), kept

    rows = _trained_rows(model, micro_batches, temperature)
    projection = model.projection(temperature, entropy_gradient=entropy_gradient)
    return run_schedule(model, micro_batches, finish, forward_only=False)


def forward_logprobs(
    model: ParallelModel, micro_batches: Sequence[MicroBatch], *, temperature: float, top_k: int = 0
) -> list[Tensor]:
    """Returns log-probabilities of the targets in `loss_mask`, 0 elsewhere; collective.

    The last pipeline stage gets one tensor [tokens] for each micro batch, the other stages []. With
    a `top_k` the shape is [tokens, 1 + 2 * top_k]: the target's log-probability, the ids of the
    most likely tokens, then their log-probabilities. `temperature` is as in `forward_backward`.
    """

    def finish(
        place: int, micro_batch: MicroBatch, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        states, weight, targets = hidden[0], model.output_weight, micro_batch.targets
        if top_k:
            places = torch.cat(rows[place])
            top = top_tokens(states[places], weight, top_k, projection)
            ids = targets.new_zeros(len(targets), top_k).index_copy(0, places, top)
            targets = torch.cat([targets[:, None], ids], dim=1)
        logprobs, _ = _logprobs(states, weight, targets, rows[place], projection)
        if top_k:
            logprobs = torch.cat([logprobs[:, :1], ids.float(), logprobs[:, 1:]], dim=1)
        return logprobs.sum(), micro_batch.loss_mask.sum().to(torch.int), logprobs

    rows = _trained_rows(model, micro_batches, temperature)
    projection = model.projection(temperature)
    with torch.no_grad():
        return run_schedule(model, micro_batches, finish, forward_only=True)


def sequence_logprobs(
    model: ParallelModel, sequences: Sequence[TokenArray], *, max_tokens: int
) -> list[LogprobArray]:
    """Returns one array of log-probabilities at temperature 1 for each sequence; collective.

    Every rank gets all arrays. An array leaves out the first token of its sequence.
    """
    return masked_outputs(
        model,
        [TrainingSequence.of_tokens(token_ids) for token_ids in sequences],
        functools.partial(forward_logprobs, model, temperature=1.0),
        max_tokens=max_tokens,
    )


def run_schedule(
    model: ParallelModel,
    micro_batches: Sequence[MicroBatch],
    finish: Finish[Output],
    *,
    forward_only: bool,
) -> list[Output]:
    """Runs Megatron's schedule; returns the results of `finish` on the last stage. Collective.

    `finish` gets a chunk's output [1, tokens, ...]: hidden states, or the values of a critic. The
    other stages return []. The layout of `model` must be in force (`Ranks.in_force`).
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    # All micro batches are copied before the first one runs: later copies would wait for the GPU.
    placed = [micro_batch.to(model.ranks.device) for micro_batch in micro_batches]

    def forward_step(
        places: Iterator[int], chunk: Megatron
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Output]]]:
        # Earlier micro batches are done, or wait in the device's short queue.
        model.ranks.activity.note()
        place = next(places)
        micro_batch = placed[place]
        with _given(model, micro_batch):
            output = chunk(
                micro_batch.token_ids[None],
                micro_batch.position_ids[None],
                None,
                packed_seq_params=_parameters(micro_batch, model.ranks.cp_size),
                **in_model_precision,
            )
        return output, functools.partial(finish, place, micro_batch)

    # Only Megatron's wrapper for half precision has `fp32_output`; true would make a larger copy.
    in_model_precision = {} if model.dtype == torch.float32 else {"fp32_output": False}
    iterators = [iter(range(len(micro_batches))) for _ in model.chunks]
    with model.memory.resident(Part.PARAMETERS), _planned(model, placed, forward_only=forward_only):
        outputs: list[Output] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=model.chunks if len(model.chunks) > 1 else model.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=max(len(micro_batch.token_ids) for micro_batch in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )
    if model.ranks.is_main:
        log_attention_once()
    return outputs


def _planned(
    model: ParallelModel, micro_batches: Sequence[MicroBatch], *, forward_only: bool
) -> AbstractContextManager[None]:
    """Returns the context in which a training pass plans, if needed, how many layers recompute."""
    if forward_only or not isinstance(model, TrainedModel) or model.recompute is None:
        return nullcontext()
    sizes = [len(micro_batch.token_ids) for micro_batch in micro_batches]
    return model.recompute.training_pass(sizes, model.ranks)


def _given(model: ParallelModel, micro_batch: MicroBatch) -> AbstractContextManager[None]:
    """Returns the context in which hooks use the images of `micro_batch`, or shared positions."""
    if model.vision is not None:
        return model.vision.images_of(micro_batch)
    return nullcontext() if model.sharing is None else model.sharing.positions_of(micro_batch)


def _parameters(micro_batch: MicroBatch, cp_size: int) -> Megatron:
    """Returns Megatron's packed-sequence parameters, with the experts that routers must replay."""
    if micro_batch.paths is not None:
        from slipstream.extensions.prefix_sharing.trainer import shared_sequences

        return shared_sequences(micro_batch, micro_batch.paths)
    from slipstream.learner.trainer.layers.attention import packed_sequences

    packed = packed_sequences(micro_batch.cu_seqlens, micro_batch.max_seqlen, cp_size)
    packed.expert_ids = micro_batch.expert_ids
    packed.is_padding = micro_batch.is_padding
    return packed


def _logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: tuple[Tensor, Tensor],
    projection: Projection,
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of `targets` and entropies, as `vocab_parallel_logprobs` does.

    `rows` has the positions of sampled tokens, and of tokens that an environment gave, which have
    temperature 1. The results are 0 at other positions.
    """
    sampled, given = rows
    if not len(given):
        return vocab_parallel_logprobs(hidden, weight, targets, sampled, projection)
    # Either both calls keep their logits or neither does.
    if (len(sampled) + len(given)) * len(weight) > projection.kept_logits:
        projection = dataclasses.replace(projection, kept_logits=0)
    plain = dataclasses.replace(projection, temperature=1.0)
    found = vocab_parallel_logprobs(hidden, weight, targets, given, plain)
    if not len(sampled):
        return found
    others = vocab_parallel_logprobs(hidden, weight, targets, sampled, projection)
    return found[0] + others[0], found[1] + others[1]


def _trained_rows(
    model: ParallelModel, micro_batches: Sequence[MicroBatch], temperature: float
) -> list[tuple[Tensor, Tensor]]:
    """Returns (sampled, given) for each micro batch: the rows of its trained tokens, on the device.

    The host computes the rows, as `nonzero` on a GPU would wait for the GPU. An environment gave
    the given tokens. At temperature 1 all tokens count as sampled.
    """
    found = []
    for micro_batch in micro_batches:
        is_given = micro_batch.behavior_logprobs.isnan() & (temperature != 1.0)
        masks = (micro_batch.loss_mask & ~is_given, micro_batch.loss_mask & is_given)
        sampled, given = (to_device(mask.nonzero()[:, 0], model.ranks.device) for mask in masks)
        found.append((sampled, given))
    return found


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
