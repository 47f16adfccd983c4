"""Opens models from Hugging Face folders: the policy, a trained critic, a frozen reference."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from slipstream.core.machine.gpus import ALL_BITS
from slipstream.core.models.images import load_processor
from slipstream.core.models.model_sizes import read_model_sizes, read_model_table
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import KEPT_LOGITS_SHARE
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.checkpoints.stored_model import (
    POLICY,
    StoredModel,
    check_nothing_lost,
    check_saved,
)
from slipstream.learner.trainer.layers.routers import finalize_gradients
from slipstream.learner.trainer.model.attention_kernels import check_attention
from slipstream.learner.trainer.model.logprobs import defer_projections
from slipstream.learner.trainer.model.model import (
    Change,
    DeviceMemory,
    MemoryPart,
    ParallelModel,
    TrainedModel,
    gradient_buffers,
    parameters,
    unwrapped,
)
from slipstream.learner.trainer.model.model_part import model_parts
from slipstream.learner.trainer.model.policy import (
    NamedAdapters,
    Policy,
    adapters,
    draw_first_adapters,
    optimizer_state,
)
from slipstream.learner.trainer.model.recipe import (
    check_biases,
    ddp_config_of,
    fuse_gradients,
    optimizer_config_of,
    provider_of,
)
from slipstream.learner.trainer.model.recompute import Recompute
from slipstream.learner.trainer.ranks import compat
from slipstream.learner.trainer.ranks.activity import Activity
from slipstream.learner.trainer.ranks.parallel import Launch, Ranks
from slipstream.learner.trainer.step_cost import Arithmetic
from slipstream.protocol.access.exposure import narrow_sockets
from torch import Tensor

if TYPE_CHECKING:
    from slipstream.learner.trainer.families.vision import Vision

logger = logging.getLogger(__name__)


def open_policy(
    config: Config, launch: Launch, *, load_weights: bool = True, activity: Activity | None = None
) -> Policy:
    """Starts this rank and loads `config.model.path` with an optimizer; collective.

    Without `load_weights` the weights are random, and the folder needs only config.json. `activity`
    counts the bytes read from the folder. Raises ConfigError for a model or a setting that cannot
    work. The caller must close the policy's `ranks`.
    """
    compat.install()
    if config.model.dtype == "float32":
        os.environ |= ALL_BITS
    meeting = os.environ.get("MASTER_ADDR", config.learner.host)
    narrow_sockets(os.environ, gloo=meeting, nccl=meeting)
    ranks = Ranks(launch, config.learner, seed=config.run.seed, activity=activity)
    parts = model_parts(config)
    adapt = adapters(config, ranks) if config.lora.rank else defer_projections

    def change(chunks: list[Megatron]) -> list[Megatron]:
        chunks = adapt(chunks)
        for part in parts:
            chunks = part.changed(chunks)
        return chunks

    model = load_trained(config, ranks, change=change, load_weights=load_weights)
    check_biases(model.chunks[0].config, config)
    are_clients = config.controller.client_loop and bool(config.lora.adapters)
    named_adapters = NamedAdapters(config.lora.adapters, model, are_clients=are_clients)
    layers = [part.layer(ranks.device, load_weights=load_weights) for part in parts]
    drafts = next(filter(None, layers), None)
    return Policy(**vars(model), adapters=named_adapters, drafts=drafts)


def load_start(policy: Policy, config: Config) -> None:
    """Loads the weights with which the run began into the policy once more; collective.

    Adapters are drawn as they were; the base model below them never changes. The optimizer keeps
    its copies of the weights and its moments.
    """
    chunks = [unwrapped(chunk) for chunk in policy.chunks]
    if config.lora.rank:
        for chunk in chunks:
            draw_first_adapters(chunk, policy.ranks, seed=config.run.seed)
    elif config.checkpoint.load is not None:
        _load_saved(chunks, config.checkpoint.load, policy.ranks)
    else:
        with torch.no_grad():
            policy.bridge.load_hf_weights(chunks)


def _load_saved(chunks: list[Megatron], path: Path, ranks: Ranks) -> None:
    from slipstream.learner.trainer.checkpoints.distributed_files import load_starting_weights

    load_starting_weights([StoredModel(POLICY, chunks, None)], path, ranks)


def load_trained(
    config: Config, ranks: Ranks, *, change: Change = defer_projections, load_weights: bool = True
) -> TrainedModel:
    """Loads `config.model.path` with an optimizer, in the layout of `config.learner`; collective.

    `ranks` must have this layout, and it must be in force. `change` may alter the model before the
    optimizer is created. If `config.checkpoint.load` is set, the weights come from there. Without
    `load_weights` they are random. Raises ConfigError if weights are loaded, and the attention
    kernel computes wrong gradients.
    """
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    model = _load(config, ranks, ddp_config_of(config), change=change, load_weights=load_weights)
    chunks = model.chunks
    fuse_gradients(chunks, config)
    optimizer = get_megatron_optimizer(optimizer_config_of(config), chunks)
    # Megatron gives each part its own scaler, but scales the loss only by the scale of the first:
    # after an overflow in one part the others would divide by a wrong scale.
    parts = optimizer.chained_optimizers
    scaler = getattr(parts[0], "grad_scaler", None) if parts else None
    scaler = scaler if isinstance(scaler, DynamicGradScaler) else None
    for part in parts if scaler is not None else ():
        part.grad_scaler = scaler
    if optimizer.config.optimizer == "sgd":
        # Megatron has no such function for it, and calls it before it loads a checkpoint.
        for part in parts:
            part.init_state_fn = _begin_momenta
    # Without this function the schedule silently leaves out the sum over replicas and over the
    # gradients of shared parameters.
    chunks[0].config.finalize_model_grads_func = finalize_gradients
    for chunk in chunks:
        # The update multiplies by the factor when it clips, in one pass over its gradients.
        chunk.gradient_factor = 1.0
        chunk.scale_gradients = functools.partial(setattr, chunk, "gradient_factor")
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    if chunks[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        chunks[0].config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]

    model.memory.own(
        {
            MemoryPart.GRADIENTS: lambda: gradient_buffers(chunks),
            MemoryPart.OPTIMIZER: lambda: optimizer_state(optimizer, chunks),
        }
    )
    recompute = None
    if config.learner.plans_recompute and ranks.device.type == "cuda":
        if model.vision is not None and model.vision.depth:
            # Layers that are computed again would miss features that the tower adds between them.
            logger.info("no layer recomputes its activations: a vision tower adds to some of them")
        else:
            recompute = Recompute(list(map(unwrapped, chunks)), config.learner)
    if load_weights:
        check_attention(model)
    return TrainedModel(**vars(model), optimizer=optimizer, scaler=scaler, recompute=recompute)


def _begin_momenta(optimizer: torch.optim.Optimizer, _: Megatron) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def load_frozen(config: Config, ranks: Ranks) -> ParallelModel:
    """Loads a model like `load_trained`, but without gradients or an optimizer; collective."""
    model = _load(config, ranks, None, change=defer_projections, load_weights=True)
    for chunk in model.chunks:
        chunk.requires_grad_(False)
    return model


def _load(
    config: Config, ranks: Ranks, ddp_config: Megatron | None, *, change: Change, load_weights: bool
) -> ParallelModel:
    bridge = compat.install().from_hf_pretrained(str(config.model.path))
    whole_config = bridge.hf_pretrained.config
    hf_config = whole_config.get_text_config()
    if load_weights:
        source = bridge.hf_pretrained.state.source
        load_tensors = source.load_tensors

        def noted(names: list[str]) -> dict[str, Tensor]:
            # Loading may take minutes.
            tensors: dict[str, Tensor] = load_tensors(names)
            ranks.activity.loaded(sum(tensor.nbytes for tensor in tensors.values()))
            return tensors

        source.load_tensors = noted
    provider = provider_of(bridge, hf_config, config, load_weights=load_weights)
    path = config.checkpoint.load

    def load(chunks: list[Megatron]) -> list[Megatron]:
        assert path is not None
        check_saved(path, ranks)
        check_nothing_lost(config, path)
        _load_saved(chunks, path, ranks)
        return chunks

    if path is not None:
        # The weights are loaded before the change, whose parameters they lack, and before the
        # optimizer, which copies them.
        provider.register_pre_wrap_hook(load)
    provider.register_pre_wrap_hook(change)
    chunks = provider.provide_distributed_model(
        ddp_config=ddp_config,
        wrap_with_ddp=ddp_config is not None,
        data_parallel_random_init=False,
        use_cpu_initialization=provider.use_cpu_initialization,
    )
    vision: Vision | None = None
    if read_model_sizes(config.model.path).has_vision:
        from slipstream.learner.trainer.families.vision import Vision

        processor = load_processor(config.model.path)
        vision = Vision([unwrapped(chunk) for chunk in chunks], whole_config, processor)
    parts = model_parts(config)
    sees_images = vision is not None
    sharings = [part.sharing(chunks, ranks.device, sees_images=sees_images) for part in parts]
    memories = [part.memory() for part in parts]
    kernels = [part.kernels() for part in parts]
    memory = next(filter(None, memories), DeviceMemory())
    memory.own({MemoryPart.PARAMETERS: lambda: parameters(chunks)})
    kept_logits = 0
    if ranks.device.type == "cuda":
        total = torch.cuda.get_device_properties(ranks.device).total_memory
        kept_logits = int(KEPT_LOGITS_SHARE * total) // torch.float32.itemsize
    return ParallelModel(
        ranks=ranks,
        parallel=config.learner.parallel,
        bridge=bridge,
        chunks=chunks,
        dtype=provider.params_dtype,
        max_positions=hf_config.max_position_embeddings,
        max_tokens=config.learner.micro_batch_tokens,
        vocab_size=hf_config.vocab_size,
        attention_length=Arithmetic.of(read_model_table(config.model.path)).attention_length,
        kept_logits=kept_logits,
        memory=memory,
        sharing=next(filter(None, sharings), None),
        vision=vision,
        kernels=next(filter(None, kernels), None),
    )
