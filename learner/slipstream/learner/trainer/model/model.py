"""A Hugging Face folder as a distributed Megatron model, with an optimizer if it is trained.

Megatron's objects are untyped; this module and `schedule` handle them.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from slipstream.learner.trainer.checkpoints.starting_weights import (
    check_no_adapters,
    check_saved,
    load_starting_weights,
)
from slipstream.learner.trainer.flops import model_sizes
from slipstream.learner.trainer.model.logprobs import defer_projection, output_weight
from slipstream.learner.trainer.model.offload import (
    HostMemory,
    Part,
    gradient_buffers,
    optimizer_state,
    parameters,
)
from slipstream.learner.trainer.model.precision import token_alignment
from slipstream.learner.trainer.model.recipe import ddp_config_of, optimizer_config_of, provider_of
from slipstream.learner.trainer.model.router_replay import replay_routers
from slipstream.learner.trainer.model.settings import Megatron
from slipstream.learner.trainer.ranks import compat, cpu
from slipstream.learner.trainer.ranks.activity import Activity
from slipstream.learner.trainer.ranks.parallel import Launch, Ranks
from slipstream.protocol.access.exposure import narrow_sockets
from slipstream.protocol.errors import UntrainableBatch
from slipstream.protocol.settings.config import Config, ParallelSection
from torch import Tensor


@dataclass(frozen=True)
class ParallelModel:
    """The parameters of this rank; `chunks` has an entry for each virtual pipeline stage."""

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
    # Element type of the logits; None: that of the parameters.
    logits_dtype: torch.dtype | None
    memory: HostMemory

    @property
    def sequence_multiple(self) -> int:
        """Divisor of a sequence's padded length: context parallel ranks hold two chunks each."""
        return 2 * self.parallel.cp if self.parallel.cp > 1 else 1

    @property
    def token_multiple(self) -> int:
        """Divisor of the number of tokens of a micro batch."""
        shards = self.parallel.tp if self.parallel.sequence_parallel else 1
        aligned = token_alignment(self.chunks[0].config) * shards * self.parallel.cp
        return math.lcm(self.sequence_multiple * shards, aligned)

    @property
    def micro_batch_multiple(self) -> int:
        """Divisor of the number of micro batches: interleaved stages work in rounds of `pp`."""
        return self.parallel.pp if self.parallel.vpp else 1

    @property
    def output_weight(self) -> Tensor:
        """This rank's rows of the projection to the vocabulary; only on the last pipeline stage."""
        return output_weight(unwrapped(self.chunks[-1]))

    def count_not_finite(self) -> int:
        """Number of this rank's parameters that are infinite or no number."""
        with self.memory.resident(Part.PARAMETERS):
            parameters = [p for chunk in self.chunks for p in chunk.parameters()]
            return sum(int((~torch.isfinite(p)).sum()) for p in parameters)

    def gather_parameters(self) -> None:
        """Completes the parameters before they are read; those of a frozen model always are."""


@dataclass(frozen=True)
class TrainedModel(ParallelModel):
    """A model with gradients and optimizer."""

    optimizer: Megatron

    def zero_grad(self) -> None:
        """Sets all gradients to zero."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self, learning_rate: float) -> float:
        """Clips and applies the gradients; returns their norm before clipping. Collective.

        Raises UntrainableBatch, with unchanged weights, when the norm is not finite on any rank.
        """
        with self.memory.resident(Part.PARAMETERS, Part.OPTIMIZER):
            return self._optimizer_step(learning_rate)

    def _optimizer_step(self, learning_rate: float) -> float:
        """Does the parts of Megatron's `step`, and checks the norm before weights change."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        # No rank may wait for one that has refused the batch.
        if self.ranks.max(torch.tensor([0.0 if math.isfinite(norm) else 1.0])).item():
            raise UntrainableBatch(f"the gradient norm is {norm}; the weights were not changed")
        # Megatron applies both multipliers in its own scheduler, which is not used here. Without
        # these lines the weights of norms would decay too.
        base = self.optimizer.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * (group["max_lr"] / base.lr)
            group["weight_decay"] = base.weight_decay * group["wd_mult"]
        self._clip(norm)
        self.optimizer.step_with_ready_grads()
        return norm

    def _clip(self, norm: float) -> None:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        for part in self.optimizer.chained_optimizers:
            trained = [] if part.is_stub_optimizer else part.get_parameters()
            if trained and part.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(
                    trained,
                    max_norm=part.config.clip_grad,
                    total_norm=norm,
                    use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )

    def gather_parameters(self) -> None:
        """Completes an all-gather left to the next forward pass: exports would see old weights."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


@dataclass(frozen=True)
class Policy(TrainedModel):
    """The model that is published and samples."""


# Function that changes the chunks of this rank after loading, before they get gradients.
Change = Callable[[list[Megatron]], list[Megatron]]


def open_policy(
    config: Config,
    launch: Launch,
    *,
    load_weights: bool = True,
    activity: Activity | None = None,
) -> Policy:
    """Starts this rank and loads `config.model.path` with an optimizer; collective.

    Without `load_weights` the weights are random, and the folder need hold config.json only. What
    is read of the folder is noted in `activity`. Raises ConfigError for a model or a setting that
    cannot work. The caller closes the policy's `ranks`.
    """
    cpu.install()
    compat.install()
    meeting = os.environ.get("MASTER_ADDR", config.weights.host)
    narrow_sockets(os.environ, gloo=meeting, nccl=(config.weights.host, meeting))
    ranks = Ranks(launch, config.learner, seed=config.run.seed, activity=activity)
    change: Change = defer_projections
    if config.lora.rank:
        from slipstream.learner.trainer.model.lora import adapters

        change = adapters(config, ranks)
    if config.algorithm.router_replay != "off":
        change = _both(change, replay_routers)
    model = load_trained(config, ranks, change=change, load_weights=load_weights)
    return Policy(**vars(model))


def _both(first: Change, second: Change) -> Change:
    return lambda chunks: second(first(chunks))


def defer_projections(chunks: list[Megatron]) -> list[Megatron]:
    """Makes every chunk return hidden states instead of logits; see `logprobs`."""
    for chunk in chunks:
        defer_projection(chunk)
    return chunks


def unwrapped(chunk: Megatron) -> Megatron:
    """Returns the GPT model inside the wrappers for replicas and precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def load_trained(
    config: Config,
    ranks: Ranks,
    *,
    change: Change = defer_projections,
    load_weights: bool = True,
) -> TrainedModel:
    """Loads `config.model.path` with an optimizer, in the layout of `config.learner`; collective.

    `ranks` must have this layout, and it must be in force. The weights come from
    `config.checkpoint.load` if that is set.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer

    model = _load(config, ranks, ddp_config_of(config), change=change, load_weights=load_weights)
    chunks = model.chunks
    optimizer = get_megatron_optimizer(optimizer_config_of(config), chunks)
    # Without this function the schedule silently leaves out the sum over replicas and over the
    # gradients of shared parameters.
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    if chunks[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        chunks[0].config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    model.memory.own(
        {
            Part.GRADIENTS: lambda: gradient_buffers(chunks),
            Part.OPTIMIZER: lambda: optimizer_state(optimizer, chunks),
        }
    )
    return TrainedModel(**vars(model), optimizer=optimizer)


def load_frozen(config: Config, ranks: Ranks) -> ParallelModel:
    """Loads a model like `load_trained`, but without gradients, their buffers or an optimizer."""
    model = _load(config, ranks, None, change=defer_projections, load_weights=True)
    for chunk in model.chunks:
        chunk.requires_grad_(False)
    return model


def _with_weights(chunks: list[Megatron], *, path: Path, ranks: Ranks) -> list[Megatron]:
    check_saved(path, ranks)
    check_no_adapters(path)
    load_starting_weights(chunks, path, ranks)
    return chunks


def _load(
    config: Config,
    ranks: Ranks,
    ddp_config: Megatron | None,
    *,
    change: Change,
    load_weights: bool,
) -> ParallelModel:
    bridge = compat.install().from_hf_pretrained(str(config.model.path))
    hf_config = bridge.hf_pretrained.config
    if load_weights:
        _note_reads(bridge.hf_pretrained.state.source, ranks.activity)
    provider = provider_of(bridge, hf_config, config, load_weights=load_weights)
    weights = config.checkpoint.load
    if weights is not None:
        # The weights are loaded before the change, whose parameters they lack, and before the
        # optimizer, which copies them.
        provider.register_pre_wrap_hook(functools.partial(_with_weights, path=weights, ranks=ranks))
    provider.register_pre_wrap_hook(change)
    chunks = provider.provide_distributed_model(
        ddp_config=ddp_config,
        wrap_with_ddp=ddp_config is not None,
        data_parallel_random_init=False,
        use_cpu_initialization=provider.use_cpu_initialization,
        bf16=provider.bf16,
    )
    logits_dtype = torch.float32 if config.model.head_dtype == "float32" else None
    memory = HostMemory(config.learner.offload)
    memory.own({Part.PARAMETERS: lambda: parameters(chunks)})
    return ParallelModel(
        ranks=ranks,
        parallel=config.learner.parallel,
        bridge=bridge,
        chunks=chunks,
        dtype=provider.params_dtype,
        max_positions=hf_config.max_position_embeddings,
        vocab_size=hf_config.vocab_size,
        attention_length=model_sizes(hf_config.to_dict()).attention_length,
        kept_logits=_kept_logits(config, ranks, logits_dtype or provider.params_dtype),
        logits_dtype=logits_dtype,
        memory=memory,
    )


def _note_reads(source: Megatron, activity: Activity) -> None:
    """Notes each tensor that Bridge takes out of a folder: a large model takes minutes."""
    load = source.load_tensors

    def noted(names: list[str]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = load(names)
        activity.loaded(sum(tensor.nbytes for tensor in tensors.values()))
        return tensors

    source.load_tensors = noted


def _kept_logits(config: Config, ranks: Ranks, dtype: torch.dtype) -> int:
    """Returns how many logits fit into their share of GPU memory; 0 on a CPU."""
    if ranks.device.type == "cpu":
        return 0
    learner = config.learner
    memory = torch.cuda.get_device_properties(ranks.device).total_memory
    share = learner.kept_logits_share * (learner.gpu_memory_fraction or 1.0)
    return int(share * memory) // dtype.itemsize
