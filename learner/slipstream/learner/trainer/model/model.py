"""A distributed Megatron model made from a Hugging Face folder, with an optimizer if trained.

Megatron's objects are untyped; this module and `schedule` handle them.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from slipstream.core.errors import UntrainableBatch
from slipstream.core.settings.sections import ParallelSection
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.model.logprobs import (
    Projection,
    bring_to_all_ranks,
    output_weight,
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
        """Number that must divide the padded length of each sequence, in tokens.

        Each context parallel rank holds two chunks of a sequence, and all chunks are equally long.
        """
        return 2 * self.parallel.cp if self.parallel.cp > 1 else 1

    @property
    def splits_tokens(self) -> bool:
        return bool(self.chunks[0].config.sequence_parallel)

    @property
    def token_multiple(self) -> int:
        """Number that must divide the number of tokens of each micro batch."""
        shards = self.parallel.tp if self.splits_tokens else 1
        aligned = token_alignment(self.chunks[0].config) * shards * self.parallel.cp
        return math.lcm(self.sequence_multiple * shards, aligned)

    @property
    def micro_batch_multiple(self) -> int:
        """Number that must divide a rank's number of micro batches, `pp` if interleaved, else 1."""
        return self.parallel.pp if self.parallel.vpp else 1

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
        with unchanged weights and scale, if the norm is not finite.
        """
        before = None if self.scaler is None else self.scaler.state_dict()
        try:
            while True:
                with self.memory.resident(Part.PARAMETERS, Part.OPTIMIZER):
                    if self._prepare_gradients():
                        return self._optimizer_step(learning_rate, adam)
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

    def _optimizer_step(self, learning_rate: float, adam: trainer_pb2.AdamNumbers | None) -> float:
        """Clips the gradients and updates the weights; returns the gradient norm before clipping.

        It replaces the rest of Megatron's `step`. Raises UntrainableBatch, before weights change,
        if the norm is not finite on any rank.
        """
        norm = float(self.optimizer.get_grad_norm())
        # No rank may wait for one that has refused the batch.
        if self.ranks.max(torch.tensor([0.0 if math.isfinite(norm) else 1.0])).item():
            raise UntrainableBatch(
                f"the gradient norm is {norm}{self._faulty()}; the weights were not changed"
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
        self._clip(norm, base.clip_grad if adam is None else adam.max_grad_norm)
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

    def _faulty(self) -> str:
        """Returns text on this rank's parameters with infinite or NaN gradients, or "" if none."""
        trained = {
            name: parameter.main_grad
            for chunk in self.chunks
            for name, parameter in unwrapped(chunk).named_parameters()
            if hasattr(parameter, "main_grad")
        }
        names = [name for name, gradient in trained.items() if not torch.isfinite(gradient).all()]
        if not names:
            return ""
        return f", not finite in {len(names)} of {len(trained)} parameters, first in {names[0]}"

    def _clip(self, norm: float, most: float) -> None:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        for part in self.optimizer.chained_optimizers:
            trained = [] if part.is_stub_optimizer else part.get_parameters()
            if trained and most > 0:
                clip_grad_by_total_norm_fp32(
                    trained,
                    max_norm=most,
                    total_norm=norm,
                    use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )

    def gather_parameters(self) -> None:
        """Runs an all-gather that the optimizer deferred to the next forward pass.

        Exports need all parameters before that pass.
        """
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def defer_projections(chunks: list[Megatron]) -> list[Megatron]:
    """Makes chunks return hidden states, not logits (see `logprobs`), and returns `chunks`.

    The output layers are still called, because Megatron's hooks on them wait for their weights.
    """
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer.forward = types.MethodType(bring_to_all_ranks, chunk.output_layer)
    return chunks


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


def shared_scaler(optimizer: Megatron) -> Megatron:
    """Makes all parts of an optimizer share the first part's loss scaler, and returns this scaler.

    Megatron gives each part its own scaler, but scales the loss only by the scale of the first:
    after an overflow in one part the others would divide by a wrong scale. Returns None if the
    scale is constant, or the loss is not scaled.
    """
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    parts = optimizer.chained_optimizers
    scaler = getattr(parts[0], "grad_scaler", None) if parts else None
    if not isinstance(scaler, DynamicGradScaler):
        return None
    for part in parts:
        part.grad_scaler = scaler
    return scaler


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


def optimizer_state(optimizer: Megatron, chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """Yields the optimizer's moments and master weights."""
    yield from master_weights(optimizer, chunks)
    for part in optimizer.chained_optimizers:
        for state in () if part.is_stub_optimizer else part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def master_weights(optimizer: Megatron, chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """Yields the tensors that the optimizer updates, except those that are model parameters."""
    theirs = {tensor.untyped_storage().data_ptr() for tensor in parameters(chunks)}
    for part in optimizer.chained_optimizers:
        for group in () if part.is_stub_optimizer else part.optimizer.param_groups:
            yield from (p for p in group["params"] if p.untyped_storage().data_ptr() not in theirs)
