"""A distributed Megatron model, its passes over a batch, and the updates of its weights.

Each rank's share of a batch is packed and runs through Megatron's pipeline schedule. Outputs for
the whole batch are gathered on all ranks. Megatron's objects are untyped; this module handles them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeVar

import torch
from slipstream.core.errors import UntrainableBatch
from slipstream.core.settings.sections import ParallelSection
from slipstream.core.types import LogprobArray, TokenArray
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.algorithms.loss import TokenLoss
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
from slipstream.learner.trainer.model.logprobs import (
    Projection,
    output_weight,
    row_logprobs,
    top_tokens,
)
from slipstream.learner.trainer.ranks import compat
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.v1 import trainer_pb2
from torch import Tensor

if TYPE_CHECKING:
    from slipstream.extensions.prefix_sharing.trainer import PrefixSharing
    from slipstream.learner.trainer.families.vision import Vision
    from slipstream.learner.trainer.model.recompute import Recompute

# Function that changes the chunks of this rank after loading, before they get gradients.
Change = Callable[[list[Megatron]], list[Megatron]]
Output = TypeVar("Output")
# (place of the micro batch, micro batch, log-probabilities, entropy) -> loss
LossFunction = Callable[[int, MicroBatch, Tensor, Tensor], TokenLoss]
# (place, micro batch, output of the last stage) -> (sum of the loss, tokens, result)
Finish = Callable[[int, MicroBatch, Tensor], tuple[Tensor, Tensor, Output]]
# Function from this replica's micro batches to one tensor [tokens] each on the last pipeline stage,
# and [] on the other stages.
Forward = Callable[[Sequence[MicroBatch]], Sequence[Tensor]]


@dataclass(frozen=True)
class ParallelModel:
    """This rank's part of a model; `chunks` has an entry for each virtual pipeline stage."""

    ranks: Ranks
    parallel: ParallelSection
    bridge: Megatron
    chunks: list[Megatron]
    dtype: torch.dtype
    max_positions: int
    vocab_size: int
    # Length of a sequence, in tokens, whose attention costs as much as its matrix products.
    attention_length: float
    # A micro batch with at most this many logits keeps them for the backward pass.
    kept_logits: int
    memory: DeviceMemory
    # None if a shared prefix is computed again for each sequence.
    sharing: PrefixSharing | None
    # None if the model sees no images.
    vision: Vision | None

    @property
    def sequence_multiple(self) -> int:
        """Number that must divide the padded length of each sequence, in tokens: see `zigzag`."""
        return 2 * self.parallel.cp if self.parallel.cp > 1 else 1

    @property
    def token_multiple(self) -> int:
        """Number that must divide the number of tokens of each micro batch."""
        config = self.chunks[0].config
        shards = self.parallel.tp if config.sequence_parallel else 1
        aligned = token_alignment(config) * shards * self.parallel.cp
        return math.lcm(self.sequence_multiple * shards, aligned)

    @property
    def output_weight(self) -> Tensor:
        """This rank's rows of the projection to the vocabulary, on the last pipeline stage only."""
        return output_weight(unwrapped(self.chunks[-1]))

    def projection(self, temperature: float, *, entropy_gradient: bool = False) -> Projection:
        """Returns the settings for computing log-probabilities from this model's hidden states."""
        config = self.chunks[0].config
        return Projection(
            temperature,
            self.vocab_size,
            self.ranks.tp_group,
            entropy_gradient=entropy_gradient,
            kept_logits=self.kept_logits,
            has_engine_bits=getattr(config, "agreement", "close") == "bits",
        )

    def count_not_finite(self) -> int:
        """Returns the number of this rank's parameter values that are infinite or NaN."""
        with self.memory.resident(Part.PARAMETERS):
            parameters = [p for chunk in self.chunks for p in chunk.parameters()]
            return sum(int((~torch.isfinite(p)).sum()) for p in parameters)

    def gather_parameters(self) -> None:
        """Completes a deferred all-gather of the parameters; does nothing for a frozen model."""


@dataclass(frozen=True)
class TrainedModel(ParallelModel):
    """A model with gradients and an optimizer."""

    optimizer: Megatron
    # The scaler of the loss in float16; None for other types.
    scaler: Megatron = None
    # The plan of how many layers recompute; None on a CPU, or if `learner.transformer` decides.
    recompute: Recompute | None = None

    def zero_grad(self) -> None:
        """Sets all gradients to zero."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.scale)

    def optimizer_step(
        self,
        learning_rate: float,
        again: Callable[[], object],
        *,
        adam: trainer_pb2.AdamNumbers | None = None,
    ) -> float:
        """Clips and applies the gradients; returns their norm before clipping. Collective.

        `adam` has the numbers of this step; None takes those of the settings.
        `again` recomputes the same gradients. It is called, at a lower loss scale, as long as
        float16 gradients overflow on any rank, so no batch is skipped. Raises UntrainableBatch,
        with unchanged weights and scale, if the norm is not finite on any rank.
        """
        before = None if self.scaler is None else self.scaler.state_dict()
        try:
            while True:
                with self.memory.resident(Part.PARAMETERS, Part.OPTIMIZER):
                    if self._prepare_gradients():
                        return self._update(learning_rate, adam)
                again()
        except UntrainableBatch:
            if before is not None:
                self.scaler.load_state_dict(before)
            raise

    def _prepare_gradients(self) -> bool:
        """Unscales the gradients; returns False if they must be recomputed at a lower loss scale.

        It works like Megatron's `prepare_grads` in each part of the optimizer, but updates the
        shared loss scale only once. Also returns True after an overflow at the lowest scale.
        """
        if self.scaler is None:
            self.optimizer.prepare_grads()
            return True
        overflowed = False
        with torch.no_grad():
            for part in self.optimizer.chained_optimizers:
                if not part.is_stub_optimizer:
                    part._copy_model_grads_to_main_grads()
                overflowed |= part._unscale_main_grads_and_check_for_nan()
        overflowed = bool(self.ranks.max(torch.tensor([float(overflowed)])).item())
        can_fall = bool(self.scaler.scale > self.scaler.min_scale)
        self.scaler.update(overflowed)
        return not (overflowed and can_fall)

    def _update(self, learning_rate: float, adam: trainer_pb2.AdamNumbers | None) -> float:
        """Replaces the rest of Megatron's `step`, after the gradients are prepared."""
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        norm = float(self.optimizer.get_grad_norm())
        # No rank may wait for one that has refused the batch.
        if self.ranks.max(torch.tensor([0.0 if math.isfinite(norm) else 1.0])).item():
            gradients = {
                name: parameter.main_grad
                for chunk in self.chunks
                for name, parameter in unwrapped(chunk).named_parameters()
                if hasattr(parameter, "main_grad")
            }
            faulty = [name for name in gradients if not torch.isfinite(gradients[name]).all()]
            where = ""
            if faulty:
                where = f", not finite in {len(faulty)} of {len(gradients)} parameters, first in "
                where += faulty[0]
            raise UntrainableBatch(
                f"the gradient norm is {norm}{where}; the weights were not changed"
            )
        # Megatron applies both multipliers in its own scheduler, which is not used here. Without
        # these lines the weights of norms would decay too.
        base = self.optimizer.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * (group["max_lr"] / base.lr)
            group["weight_decay"] = base.weight_decay * group["wd_mult"]
            if adam is not None:
                group["betas"], group["eps"] = (adam.beta1, adam.beta2), adam.eps
                group["weight_decay"] = adam.weight_decay * group["wd_mult"]
        most = base.clip_grad if adam is None else adam.max_grad_norm
        for part in self.optimizer.chained_optimizers:
            trained = [] if part.is_stub_optimizer else part.get_parameters()
            if trained and most > 0:
                clip_grad_by_total_norm_fp32(
                    trained,
                    max_norm=most,
                    total_norm=norm,
                    use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
        self.optimizer.step_with_ready_grads()
        return norm

    def forget_moments(self) -> None:
        """Makes the optimizer begin anew, with the weights as they are."""
        for group in self.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0
        for part in self.optimizer.chained_optimizers:
            if not part.is_stub_optimizer:
                for state in part.optimizer.state.values():
                    for value in state.values():
                        value.zero_()

    def gather_parameters(self) -> None:
        """Runs an all-gather that the optimizer deferred to the next forward pass.

        Exports need all parameters before that pass.
        """
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def unwrapped(chunk: Megatron) -> Megatron:
    """Returns the GPT model inside Megatron's wrappers for data parallelism and mixed precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def token_alignment(settings: Megatron) -> int:
    """Returns a number that must divide a rank's number of tokens.

    Tensor cores take 8-bit operands in blocks of 16 numbers; in mxfp8, 32 numbers share a scale.
    TransformerEngine's faster norms take blocks of 4 tokens; routers would count tokens that pad a
    block. `settings` are Megatron's settings of the model.
    """
    if not settings.fp8:
        is_equal = getattr(settings, "agreement", "close") == "bits"
        has_norms = compat.has_transformer_engine() and not is_equal
        return 4 if has_norms and not settings.num_moe_experts else 1
    return 32 if settings.fp8_recipe == "mxfp8" else 16


class Part(Enum):
    """A part of a model that need not be on the device all the time."""

    PARAMETERS = "parameters"
    # Gradients are needed from `zero_grad` to the optimizer's step only: they are dropped, not
    # copied.
    GRADIENTS = "gradients"
    # Moments and master weights.
    OPTIMIZER = "optimizer"


class DeviceMemory:
    """Keeps all parts of a model on the device; `HostMemory` moves unused ones away."""

    def own(self, tensors: Mapping[Part, Callable[[], Iterable[Tensor]]]) -> None:
        """Takes for each part a function that returns the part's tensors, which may be replaced."""

    def offloads(self, part: Part) -> bool:
        """Whether `part` moves to host memory when it is not in use."""
        return False

    def resident(self, *parts: Part) -> AbstractContextManager[None]:
        """Returns a context in which `parts` are on the device."""
        return nullcontext()

    def settle(self) -> None:
        """Moves parts to where they are while nothing uses them, before any use."""


def parameters(chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """Yields the parameters of all chunks, including frozen ones."""
    for chunk in chunks:
        yield from chunk.parameters()


def gradient_buffers(chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """Yields the flat buffers whose views are the gradients."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


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
        logprobs, entropy = row_logprobs(
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
        logprobs, _ = row_logprobs(states, weight, targets, rows[place], projection)
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
            from slipstream.extensions.prefix_sharing.trainer import shared_sequences

            packed = shared_sequences(micro_batch, micro_batch.paths)
        else:
            bounds, longest = micro_batch.cu_seqlens, micro_batch.max_seqlen
            packed = packed_sequences(bounds, longest, model.ranks.cp_size)
            packed.expert_ids = micro_batch.expert_ids
            packed.is_padding = micro_batch.is_padding
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
    with model.memory.resident(Part.PARAMETERS), planned:
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


def masked_outputs(
    model: ParallelModel,
    sequences: Sequence[TrainingSequence],
    forward: Forward,
    *,
    max_tokens: int,
    width: int = 0,
) -> list[LogprobArray]:
    """Returns for each sequence the float32 outputs where its loss mask is set; on every rank.

    Each array is [trained tokens], or [trained tokens, width] with a `width`. The layout of `model`
    must be in force; each replica computes its share. Collective: besides the model's own messages,
    4 bytes for each output of the batch are summed over all ranks.
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
    ranks, limit = model.ranks, max_tokens * model.ranks.cp_size
    # A rank of an interleaved pipeline needs a multiple of `pp` micro batches.
    multiple = model.parallel.pp if model.parallel.vpp else 1
    shared = None
    if model.sharing is not None:
        shared = model.sharing.plan(
            sequences,
            members,
            max_tokens=limit,
            dp_size=ranks.dp_size,
            multiple=multiple,
            attention_length=model.attention_length,
        )
    if shared is None:
        plan = plan_micro_batches(
            [round_up(len(sequences[index]), model.sequence_multiple) for index in members],
            max_tokens=limit,
            dp_size=ranks.dp_size,
            multiple=multiple,
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
