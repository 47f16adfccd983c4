"""A distributed Megatron model, and where its parts are. Megatron's objects are untyped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch
from slipstream.core.settings.sections import ParallelSection
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.layers.routers import token_counts
from slipstream.learner.trainer.model.logprobs import HeadKernels, Projection
from slipstream.learner.trainer.ranks import compat
from slipstream.learner.trainer.ranks.parallel import Ranks
from torch import Tensor

if TYPE_CHECKING:
    from slipstream.learner.trainer.families.vision import Vision
    from slipstream.learner.trainer.model.recompute import Recompute
    from slipstream.learner.trainer.model.sharing import Sharing

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
    # Limit of a rank's part of a micro batch.
    max_tokens: int
    vocab_size: int
    # Length of a sequence, in tokens, whose attention costs as much as its matrix products.
    attention_length: float
    # A micro batch with at most this many logits keeps them for the backward pass.
    kept_logits: int
    memory: DeviceMemory
    # The sharing, or None if a shared prefix is computed again for each sequence.
    sharing: Sharing | None
    # The tower, or None if the model sees no images.
    vision: Vision | None
    # Kernels of logits and log-probabilities in place of torch's.
    kernels: HeadKernels | None = field(kw_only=True, default=None)

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
        """This rank's rows of the projection to the vocabulary, on the last pipeline stage only.

        They are the embedding's if the two are tied.
        """
        chunk = unwrapped(self.chunks[-1])
        if chunk.share_embeddings_and_output_weights:
            shared: Tensor = chunk.shared_embedding_or_output_weight()
            return shared
        output_weight: Tensor = chunk.output_layer.weight
        return output_weight

    def projection(self, temperature: float, *, entropy_gradient: bool = False) -> Projection:
        """Returns the settings for computing log-probabilities from this model's hidden states."""
        return Projection(
            temperature,
            self.vocab_size,
            self.ranks.tp_group,
            entropy_gradient=entropy_gradient,
            kept_logits=self.kept_logits,
            kernels=self.kernels,
        )

    def count_not_finite(self) -> int:
        """Returns the number of this rank's parameter values that are infinite or NaN."""
        with self.memory.resident(MemoryPart.PARAMETERS):
            return sum(int((~torch.isfinite(p)).sum()) for p in parameters(self.chunks))


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
        for counts in token_counts(self.chunks):
            counts.zero_()
        self.optimizer.zero_grad()

    @property
    def gradient_factor(self) -> float:
        """What the gradients have yet to be multiplied by: 1 / trained tokens of all ranks."""
        return float(self.chunks[0].gradient_factor)

    def gradient_norm(self) -> float:
        """Returns the norm of the gradients, which must be prepared for the update; collective."""
        return self.gradient_factor * float(self.optimizer.get_grad_norm())

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.scale)

    def forget_moments(self) -> None:
        """Makes the optimizer begin anew, with the weights as they are."""
        for group in self.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0
        for part in torch_optimizers(self.optimizer):
            for state in part.state.values():
                for name, value in state.items():
                    # Some optimizers keep the weights themselves there, unrounded.
                    if name != "master_param":
                        value.zero_()

    def gather_parameters(self) -> None:
        """Runs an all-gather that was deferred to the next forward pass, for exports before it."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def unwrapped(chunk: Megatron) -> Megatron:
    """Returns the GPT model inside Megatron's wrappers for data parallelism and mixed precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def torch_optimizers(optimizer: Megatron) -> list[Megatron]:
    """Returns the torch optimizers inside Megatron's optimizer."""
    parts = optimizer.chained_optimizers
    return [part.optimizer for part in parts if not part.is_stub_optimizer]


# Numbers that share a scale, by TransformerEngine's recipes that scale blocks.
_FP8_BLOCKS = {"mxfp8": 32, "blockwise": 128}


def token_alignment(settings: Megatron) -> int:
    """Returns a number that must divide a rank's number of tokens.

    Tensor cores take 8-bit operands in blocks of 16 numbers. In mxfp8 32 numbers share a scale, in
    blockwise FP8 128.
    TransformerEngine's faster norms take blocks of 4 tokens; routers would count tokens that pad a
    block. `settings` are Megatron's settings of the model.
    """
    if not settings.fp8:
        is_equal = getattr(settings, "agreement", "close") == "bits"
        has_norms = compat.has_transformer_engine() and not is_equal
        return 4 if has_norms and not settings.num_moe_experts else 1
    return _FP8_BLOCKS.get(settings.fp8_recipe, 16)


class MemoryPart(Enum):
    """A part of a model that need not be on the device all the time."""

    PARAMETERS = "parameters"
    # Gradients are needed from `zero_grad` to the optimizer's step only: they are dropped, not
    # copied.
    GRADIENTS = "gradients"
    # Moments and master weights.
    OPTIMIZER = "optimizer"


class DeviceMemory:
    """Keeps all parts of a model on the device; `HostMemory` moves unused ones away."""

    def own(self, tensors: Mapping[MemoryPart, Callable[[], Iterable[Tensor]]]) -> None:
        """Takes for each part a function that returns the part's tensors, which may be replaced."""

    def offloads(self, part: MemoryPart) -> bool:
        """Whether `part` moves to host memory when it is not in use."""
        return False

    def resident(self, *parts: MemoryPart) -> AbstractContextManager[None]:
        """Returns a context in which `parts` are on the device."""
        return nullcontext()


def parameters(chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """Yields the parameters of all chunks, including frozen ones."""
    for chunk in chunks:
        yield from chunk.parameters()


def gradient_buffers(chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """Yields the flat buffers whose views are the gradients, and the counts of routers."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data
    yield from token_counts(chunks)
