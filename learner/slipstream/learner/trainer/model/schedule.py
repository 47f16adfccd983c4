"""Packing of sequences into micro batches, a model's passes over them, and the update that follows.

Each rank's share of a batch is packed and runs through Megatron's pipeline schedule. Outputs for
the whole batch are gathered on all ranks. A micro batch is one row of tokens: either its sequences
one after the other, or the segments of bundles, in which a shared prefix of sequences is stored
once. The target of a position is the token that the position predicts.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from slipstream.core.errors import UntrainableBatch
from slipstream.core.types import LogprobArray, TokenArray
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.algorithms.loss import TokenLoss
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.planner import plan_micro_batches, round_up
from slipstream.learner.trainer.batches.sequence_images import ImageInputs
from slipstream.learner.trainer.batches.training_sequence import (
    TOKEN_FIELDS,
    Bundle,
    MicroBatch,
    Paths,
    Segment,
    SequenceColumn,
    TrainingSequence,
    kept_ids_of,
    share_of_rank,
    to_device,
    zigzag,
)
from slipstream.learner.trainer.layers.routers import move_biases
from slipstream.learner.trainer.model.logprobs import Rows, row_logprobs, top_tokens
from slipstream.learner.trainer.model.model import (
    MemoryPart,
    ParallelModel,
    TrainedModel,
    unwrapped,
)
from slipstream.v1 import trainer_pb2
from torch import Tensor

Output = TypeVar("Output")
# (place of the micro batch, micro batch, log-probabilities, entropy) -> loss
LossFunction = Callable[[int, MicroBatch, Tensor, Tensor], TokenLoss]
# (micro batch, hidden states [tokens, hidden size])
Observe = Callable[[MicroBatch, Tensor], None]
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
    observe: Observe | None = None,
) -> list[TokenLoss]:
    """Accumulates the gradients of all micro batches, divided by the trained tokens of all ranks.

    Collective. Returns the loss of each micro batch, detached, on the last pipeline stage, and []
    on the other stages. `temperature` applies to tokens that the policy sampled; tokens that an
    environment gave have temperature 1. Set `entropy_gradient` if the loss needs the gradient of
    the entropies. `observe` gets the hidden states of each micro batch, without their gradients.
    """

    def finish(
        place: int, micro_batch: MicroBatch, hidden: Tensor
    ) -> tuple[Tensor, Tensor, TokenLoss]:
        if observe is not None:
            observe(micro_batch, hidden[0].detach())
        logprobs, entropy = row_logprobs(
            hidden[0],
            model.output_weight,
            micro_batch.all_targets,
            rows[place],
            projection,
            kept_ids=micro_batch.kept_ids,
        )
        token_loss = loss(place, micro_batch, logprobs, entropy)
        detached = dataclasses.replace(token_loss, loss=token_loss.loss.detach())
        return token_loss.loss, token_loss.num_tokens.to(torch.int), detached

    rows = _trained_rows(model, micro_batches, temperature)
    projection = model.projection(temperature, entropy_gradient=entropy_gradient)
    return run_schedule(model, micro_batches, finish, forward_only=False)


def early_norm(model: TrainedModel) -> float | None:
    """Returns the norm of the gradients, prepared for the update, or None; collective.

    The host does so while the device still computes gradients: what it reads next is there. None
    stands for gradients that are scaled, and for optimizer state that would have to be brought.
    """
    if model.scaler is not None or model.memory.offloads(MemoryPart.OPTIMIZER):
        return None
    model.optimizer.prepare_grads()
    return model.gradient_norm()


def update_weights(
    model: TrainedModel,
    learning_rate: float,
    again: Callable[[], object],
    *,
    norm: float | None = None,
    adam: trainer_pb2.AdamNumbers | None = None,
) -> float:
    """Clips and applies the gradients; returns their norm before clipping. Collective.

    `norm` is that of `early_norm`, if it was called since the gradients were computed.
    `adam` has the numbers of this step; None takes those of the settings.
    `again` recomputes the same gradients. It is called, at a lower loss scale, as long as
    float16 gradients overflow on any rank, so no batch is skipped. Raises UntrainableBatch,
    with unchanged weights and scale, if the norm is not finite on any rank.
    """
    resident = functools.partial(model.memory.resident, MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER)
    scaler = model.scaler
    if scaler is None:
        with resident():
            if norm is None:
                model.optimizer.prepare_grads()
                norm = model.gradient_norm()
            return _step(model, learning_rate, adam, norm)
    before = scaler.state_dict()
    try:
        while True:
            with resident():
                # Megatron's `prepare_grads` of each part would update the shared scale each time.
                overflowed = False
                with torch.no_grad():
                    for part in model.optimizer.chained_optimizers:
                        if not part.is_stub_optimizer:
                            part._copy_model_grads_to_main_grads()
                        overflowed |= part._unscale_main_grads_and_check_for_nan()
                overflowed = bool(model.ranks.max(torch.tensor([float(overflowed)])).item())
                can_fall = bool(scaler.scale > scaler.min_scale)
                scaler.update(overflowed)
                # After an overflow at the lowest scale the step refuses the batch.
                if not (overflowed and can_fall):
                    return _step(model, learning_rate, adam, model.gradient_norm())
            again()
    except UntrainableBatch:
        scaler.load_state_dict(before)
        raise


def _step(
    model: TrainedModel, learning_rate: float, adam: trainer_pb2.AdamNumbers | None, norm: float
) -> float:
    """Replaces the rest of Megatron's `step`, after the gradients are prepared."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    # No rank may wait for one that has refused the batch.
    if model.ranks.max(torch.tensor([0.0 if math.isfinite(norm) else 1.0])).item():
        gradients = {
            name: parameter.main_grad
            for chunk in model.chunks
            for name, parameter in unwrapped(chunk).named_parameters()
            if hasattr(parameter, "main_grad")
        }
        faulty = [name for name in gradients if not torch.isfinite(gradients[name]).all()]
        where = ""
        if faulty:
            where = f", not finite in {len(faulty)} of {len(gradients)} parameters, first in "
            where += faulty[0]
        raise UntrainableBatch(f"the gradient norm is {norm}{where}; the weights were not changed")
    # Megatron applies both multipliers in its own scheduler, which is not used here. Without
    # these lines the weights of norms would decay too.
    base = model.optimizer.config
    for group in model.optimizer.param_groups:
        group["lr"] = learning_rate * (group["max_lr"] / base.lr)
        group["weight_decay"] = base.weight_decay * group["wd_mult"]
        if adam is not None:
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay * group["wd_mult"]
    max_norm = base.clip_grad if adam is None else adam.max_grad_norm
    factor = model.gradient_factor * (min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0)
    for part in model.optimizer.chained_optimizers:
        trained = [] if part.is_stub_optimizer else part.get_parameters()
        if trained:
            # Megatron multiplies by the ratio, if it is below 1, of a limit and a norm to which it
            # adds 1e-6.
            clip_grad_by_total_norm_fp32(
                trained,
                max_norm=factor,
                total_norm=1.0 - 1e-6,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    model.optimizer.step_with_ready_grads()
    move_biases(model.chunks)
    return norm


def forward_logprobs(
    model: ParallelModel,
    micro_batches: Sequence[MicroBatch],
    *,
    temperature: float,
    top_k: int = 0,
) -> list[Tensor]:
    """Returns log-probabilities of the targets in `loss_mask`, 0 elsewhere; collective.

    The last pipeline stage gets one tensor [tokens] for each micro batch, the other stages []. With
    a `top_k` the shape is [tokens, 1 + 2 * top_k]: the target's log-probability, the ids of the
    most likely tokens, then their log-probabilities. `temperature` is as in `forward_backward`.
    """

    def finish(
        place: int, micro_batch: MicroBatch, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        states = hidden[0]
        weight = model.output_weight
        targets = micro_batch.targets
        if top_k:
            places = torch.cat([part.places for part in rows[place]])
            top = top_tokens(states[places], weight, top_k, projection)
            ids = targets.new_zeros(len(targets), top_k).index_copy(0, places, top)
            targets = torch.cat([targets[:, None], ids], dim=1)
        kept_ids = micro_batch.kept_ids
        logprobs, _ = row_logprobs(
            states, weight, targets, rows[place], projection, kept_ids=kept_ids
        )
        if top_k:
            logprobs = torch.cat([logprobs[:, :1], ids.float(), logprobs[:, 1:]], dim=1)
        return logprobs.sum(), micro_batch.loss_mask.sum().to(torch.int), logprobs

    rows = _trained_rows(model, micro_batches, temperature)
    projection = model.projection(temperature)
    with torch.no_grad():
        return run_schedule(model, micro_batches, finish, forward_only=True)


def forward_policy(
    model: TrainedModel, micro_batches: Sequence[MicroBatch], *, temperature: float
) -> list[tuple[Tensor, Tensor]]:
    """Returns what the loss of each micro batch gets, without gradients; collective.

    The last pipeline stage gets the log-probabilities of `all_targets` and the entropies of each
    micro batch, the other stages []. `temperature` is as in `forward_backward`.
    """

    def finish(
        place: int, micro_batch: MicroBatch, hidden: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        logprobs, entropy = row_logprobs(
            hidden[0],
            model.output_weight,
            micro_batch.all_targets,
            rows[place],
            projection,
            kept_ids=micro_batch.kept_ids,
        )
        number = micro_batch.loss_mask.sum().to(torch.int)
        return logprobs.sum(), number, (logprobs, entropy)

    rows = _trained_rows(model, micro_batches, temperature)
    projection = model.projection(temperature)
    with torch.no_grad():
        return run_schedule(model, micro_batches, finish, forward_only=True)


def sequence_logprobs(model: ParallelModel, sequences: Sequence[TokenArray]) -> list[LogprobArray]:
    """Returns log-probabilities at temperature 1 of all tokens but first ones; collective."""
    sequences_of_tokens = [TrainingSequence.of_tokens(token_ids) for token_ids in sequences]
    return masked_outputs(
        model, sequences_of_tokens, functools.partial(forward_logprobs, model, temperature=1.0)
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
    from slipstream.learner.trainer.layers.attention import log_attention_once, packed_sequences

    # All micro batches are copied before the first one runs: later copies would wait for the GPU.
    placed = [micro_batch.to(model.ranks.device) for micro_batch in micro_batches]

    def forward_step(
        places: Iterator[int], chunk: Megatron
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Output]]]:
        # Earlier micro batches are done, or wait in the device's short queue.
        model.ranks.activity.note()
        place = next(places)
        micro_batch = placed[place]
        # Hooks use the images of the micro batch, or positions of shared prefixes.
        hooks: AbstractContextManager[None] = nullcontext()
        if model.vision is not None:
            hooks = model.vision.images_of(micro_batch)
        elif model.sharing is not None:
            hooks = model.sharing.positions_of(micro_batch)
        if micro_batch.paths is not None:
            assert model.sharing is not None, "a plan of paths comes from it"
            packed = model.sharing.packed(micro_batch, micro_batch.paths)
        else:
            bounds = micro_batch.cu_seqlens
            longest = micro_batch.max_seqlen
            packed = packed_sequences(bounds, longest, model.ranks.cp_size)
            packed.expert_ids = micro_batch.expert_ids
            packed.is_padding = micro_batch.is_padding
            packed.positions = micro_batch.position_ids
        with hooks:
            output = chunk(
                micro_batch.token_ids[None],
                micro_batch.position_ids[None],
                None,
                packed_seq_params=packed,
                **in_model_precision,
            )
        return output, functools.partial(finish, place, micro_batch)

    # Only Megatron's wrapper for half precision has `fp32_output`; true would make a larger copy.
    in_model_precision = {} if model.dtype == torch.float32 else {"fp32_output": False}
    iterators = [iter(range(len(micro_batches))) for _ in model.chunks]
    planned: AbstractContextManager[None] = nullcontext()
    if not forward_only and isinstance(model, TrainedModel) and model.recompute is not None:
        sizes = [len(micro_batch.token_ids) for micro_batch in placed]
        planned = model.recompute.training_pass(sizes, model.ranks)
    with model.memory.resident(MemoryPart.PARAMETERS), planned:
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


def _trained_rows(
    model: ParallelModel, micro_batches: Sequence[MicroBatch], temperature: float
) -> list[list[Rows]]:
    """Returns each micro batch's trained rows, by temperature, made on the host, on the device.

    Sampled tokens have `temperature` or one of their own, and given ones 1. There is at least one
    part, which is empty if no row is trained.
    """
    device = model.ranks.device
    rows_of_batches: list[list[Rows]] = []
    for micro_batch in micro_batches:
        mask = micro_batch.loss_mask
        is_given = micro_batch.behavior_logprobs.isnan()
        temperatures = micro_batch.temperatures
        if temperatures is None:
            temperatures = torch.full(mask.shape, temperature, dtype=torch.float64)
        temperatures = torch.where(is_given, 1.0, temperatures)
        parts = []
        for value in np.unique(temperatures[mask].numpy()).tolist() or [temperature]:
            is_of_part = mask & (temperatures == value)
            places = to_device(is_of_part.nonzero()[:, 0], device)
            has_sampled = bool((is_of_part & ~is_given).any())
            parts.append(Rows(places, value, has_sampled))
        rows_of_batches.append(parts)
    return rows_of_batches


def masked_outputs(
    model: ParallelModel,
    sequences: Sequence[TrainingSequence],
    forward: Forward,
    *,
    width: int = 0,
) -> list[LogprobArray]:
    """Returns for each sequence the float32 outputs where its loss mask is set; on every rank.

    Each array is [trained tokens], or [trained tokens, width] with a `width`. The layout of `model`
    must be in force; each replica computes its share. Collective: besides the model's own messages,
    4 bytes for each output of the batch are summed over all ranks.
    """
    ranks = model.ranks
    wholes = _packed(model, sequences, range(len(sequences)))
    outputs = forward(
        [share_of_rank(micro_batch, ranks.cp_rank, ranks.cp_size) for micro_batch in wholes]
    )
    starts = [0, *accumulate(int(sequence.loss_mask.sum()) for sequence in sequences)]
    tail = (width,) if width else ()
    joined = torch.zeros((starts[-1], *tail), dtype=torch.float32)
    if ranks.counts:
        for micro_batch, values in zip(wholes, outputs, strict=True):
            bounds = micro_batch.cu_seqlens.tolist()
            # A context parallel rank has some values; the sum over all ranks completes them.
            row = torch.zeros((bounds[-1], *tail), dtype=torch.float32)
            row[zigzag(bounds, ranks.cp_rank, ranks.cp_size)] = values.float().cpu()
            places = micro_batch.sequence_ids[micro_batch.loss_mask]
            masked = row[micro_batch.loss_mask]
            for place, index in enumerate(micro_batch.indices):
                joined[starts[index] : starts[index + 1]] = masked[places == place]
    ranks.sum(joined)
    return [joined[start:end].numpy() for start, end in pairwise(starts)]


def sequences_here(model: ParallelModel, sequences: Sequence[TrainingSequence]) -> set[int]:
    """Returns the indices of the sequences that `masked_outputs` computes on this rank."""
    micro_batches = _packed(model, sequences, range(len(sequences)))
    return {index for micro_batch in micro_batches for index in micro_batch.indices}


def rank_micro_batches(
    model: ParallelModel, sequences: Sequence[TrainingSequence], members: Sequence[int]
) -> list[MicroBatch]:
    """Returns this rank's packed share of the sequences `members`; its layout must be in force."""
    wholes = _packed(model, sequences, members)
    return [
        share_of_rank(micro_batch, model.ranks.cp_rank, model.ranks.cp_size)
        for micro_batch in wholes
    ]


def _packed(
    model: ParallelModel, sequences: Sequence[TrainingSequence], members: Sequence[int]
) -> list[MicroBatch]:
    dp_rank = model.ranks.dp_rank
    limits = _limits(model)
    shared = None if model.sharing is None else model.sharing.plan(sequences, members, **limits)
    if shared is not None:
        return [
            build_tree_micro_batch(sequences, bundles, multiple=model.token_multiple)
            for bundles in shared[dp_rank]
        ]
    lengths = [round_up(len(sequences[index]), model.sequence_multiple) for index in members]
    plan = plan_micro_batches(lengths, **limits)
    return [
        build_micro_batch(
            sequences,
            [Segment(members[place], 0, len(sequences[members[place]])) for place in places],
            multiple=model.token_multiple,
            sequence_multiple=model.sequence_multiple,
        )
        for places in plan[dp_rank]
    ]


def _limits(model: ParallelModel) -> dict[str, Any]:
    ranks = model.ranks
    return {
        "max_tokens": model.max_tokens * ranks.cp_size,
        "dp_size": ranks.dp_size,
        # A rank of an interleaved pipeline needs a multiple of `pp` micro batches.
        "multiple": model.parallel.pp if model.parallel.vpp else 1,
        "attention_length": model.attention_length,
    }


def planned_sequences(model: ParallelModel, batch: Batch, members: Sequence[int]) -> set[int]:
    """Returns those of the sequences `members` of a batch that `rank_micro_batches` packs here."""
    dp_rank = model.ranks.dp_rank
    limits = _limits(model)
    if model.sharing is not None:
        sequences = TrainingSequence.of_trajectories(batch.trajectories, step=batch.step)
        shared = model.sharing.plan(sequences, members, **limits)
        if shared is not None:
            bundles = chain.from_iterable(shared[dp_rank])
            return {segment.index for bundle in bundles for segment in bundle}
    lengths = [round_up(batch.lengths[index], model.sequence_multiple) for index in members]
    plan = plan_micro_batches(lengths, **limits)
    return {members[place] for places in plan[dp_rank] for place in places}


def build_tree_micro_batch(
    sequences: Sequence[TrainingSequence], bundles: Sequence[Bundle], *, multiple: int = 1
) -> MicroBatch:
    """Packs the segments of `bundles`, and filler behind them, into one micro batch.

    Each segment attends to those on its path; see `build_micro_batch`.
    """
    segments = [segment for bundle in bundles for segment in bundle]
    packed = build_micro_batch(sequences, segments, multiple=multiple)
    bounds = packed.cu_seqlens.tolist()
    # The keys of all segments, and of the filler after them.
    places: list[npt.NDArray[np.int64]] = []
    for bundle in bundles:
        first = len(places)
        for segment in bundle:
            own_places = np.arange(bounds[len(places)], bounds[len(places) + 1])
            before = [] if segment.parent is None else [places[first + segment.parent]]
            places.append(np.concatenate([*before, own_places]))
    if len(places) < len(bounds) - 1:
        places.append(np.arange(bounds[-2], bounds[-1]))
    return dataclasses.replace(packed, paths=Paths.of(places, bounds[-1]))


def build_micro_batch(
    sequences: Sequence[TrainingSequence],
    segments: Sequence[Segment],
    *,
    multiple: int = 1,
    sequence_multiple: int = 1,
) -> MicroBatch:
    """Packs `segments` of `sequences`, and filler behind them, into one micro batch.

    Filler makes the number of tokens divisible by `multiple`. Each segment is padded at its end to
    a length divisible by `sequence_multiple`, which must divide `multiple`; padding has no loss,
    and does not affect the tokens before it. Positions count from the beginning of a sequence. The
    target of a segment's last position is the next token of the segment's sequence.
    `MicroBatch.indices` names each sequence once. Without segments the micro batch is all filler,
    so it is never empty. `sequences` are all sequences of the step; filler has the same fields as
    the first of them.
    """
    parts = [
        _padded(sequences[segment.index], segment, multiple=sequence_multiple)
        for segment in segments
    ]
    place_of: dict[int, int] = {}
    for segment in segments:
        place_of.setdefault(segment.index, len(place_of))
    places = [place_of[segment.index] for segment in segments]
    num_tokens = sum(map(len, parts))
    if missing := round_up(max(1, num_tokens), multiple) - num_tokens:
        nothing = TrainingSequence.of_tokens(np.zeros(0, dtype=np.uint32))
        like = sequences[0] if sequences else nothing
        filler = like.map_fields(lambda array, column: column.filled(missing, array))
        parts.append(dataclasses.replace(filler, loss_weight=1.0, images=()))
        segments = [*segments, Segment(len(sequences), 0, 0)]
        places.append(len(place_of))
    lengths = np.array([len(part) for part in parts])
    ends = np.cumsum(lengths)
    own_lengths = np.array([len(segment) for segment in segments])
    weights = np.array([part.loss_weight for part in parts], dtype=np.float32)
    first = np.repeat(ends - lengths - [segment.start for segment in segments], lengths)
    images = [part.images for part in parts]
    fields: dict[str, Any] = {}
    if sequences and sequences[0].kept_sets is not None:
        fields["kept_ids"] = torch.from_numpy(kept_ids_of(sequences, segments, lengths))
    for name, column in TOKEN_FIELDS.items():
        arrays = [getattr(part, name) for part in parts]
        if any(array is not None for array in arrays):
            joined = column.joined(arrays, lengths.tolist())
            # torch supports hardly any operation on unsigned integers of two bytes.
            fields[name] = torch.from_numpy(
                joined.astype(np.int32) if joined.dtype == np.uint16 else joined
            )
    return MicroBatch(
        **fields,
        position_ids=torch.from_numpy(np.arange(ends[-1]) - first),
        loss_weights=torch.from_numpy(np.repeat(weights, lengths)),
        sequence_ids=torch.from_numpy(np.repeat(np.asarray(places), lengths)),
        is_padding=torch.from_numpy(
            np.arange(ends[-1]) >= np.repeat(ends - lengths + own_lengths, lengths)
        ),
        cu_seqlens=torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        max_seqlen=int(lengths.max()),
        indices=tuple(place_of),
        images=ImageInputs.of(images, lengths.tolist()) if any(images) else None,
    )


def _padded(sequence: TrainingSequence, segment: Segment, *, multiple: int) -> TrainingSequence:
    """Returns a segment of its sequence, padded at its end to a length divisible by `multiple`."""
    missing = -len(segment) % multiple
    if not missing and len(segment) == len(sequence):
        return sequence

    def cut_and_filled(array: npt.NDArray[Any], column: SequenceColumn) -> npt.NDArray[Any]:
        cut = array[segment.start : segment.end]
        return np.concatenate([cut, column.filled(missing, array)]) if missing else cut

    return sequence.map_fields(cut_and_filled)
