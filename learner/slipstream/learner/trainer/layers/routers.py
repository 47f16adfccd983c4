"""Losses of routers that count no padding, and biases that move with the weights.

The losses act alike in every parallel layout. Megatron multiplies such a loss by the tokens of one
rank and by the number of ranks that share a micro batch. That is the number of its tokens only
while none of them is padding.

Each pass of training counts the tokens of each expert. Megatron moves the biases by these counts at
the end of a pass, although gradients are checked only then, and may be added to.
"""

import functools
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.ranks.cpu import substitute
from torch import Tensor


def counts_tokens(settings: Megatron) -> bool:
    """Returns whether `settings`, Megatron's of a model, make losses or biases count tokens."""
    losses = np.any(settings.moe_aux_loss_coeff) or settings.moe_z_loss_coeff
    return bool(losses or moves_biases(settings))


def moves_biases(settings: Megatron) -> bool:
    """Returns whether `settings`, Megatron's of a model, move its routers' biases in training."""
    return bool(settings.moe_router_enable_expert_bias and settings.moe_router_bias_update_rate)


def count_tokens_once(chunks: list[Megatron]) -> list[Megatron]:
    """Makes routers count the tokens of a micro batch without its padding; returns `chunks`."""
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    def counted(
        routing_map: Tensor, reduce_group: Megatron, topk: int, **_: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Tokens of each expert in the ranks of the group, a rank's share, and all tokens. The map
        # [tokens, experts] is 0 for padding; a micro batch of padding alone has no loss.
        by_expert = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), reduce_group)
        total = (by_expert.sum() / topk).clamp(min=1)
        return by_expert, total / reduce_group.size(), total

    def mask_padding(
        layer: Megatron, arguments: tuple[object, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]]:
        mask = keywords["packed_seq_params"].is_padding
        if layer.config.sequence_parallel:
            size = len(mask) // layer.config.tensor_model_parallel_size
            mask = mask[layer.mlp.tp_group.rank() * size :][:size]
        return arguments, keywords | {"padding_mask": mask[None]}

    def unpadded(count: Megatron, routing_map: Tensor, padding_mask: Tensor) -> None:
        # Megatron's own mask lacks the dimension of the experts.
        count(routing_map & ~padding_mask[:, None])

    module: Megatron = importlib.import_module("megatron.core.transformer.moe.router")
    substitute(module, {"get_tokens_per_expert_and_token_count": counted})
    for chunk in chunks:
        for layer in sparse_layers(chunk):
            layer.register_forward_pre_hook(mask_padding, with_kwargs=True)
            router = layer.mlp.router
            router._apply_expert_bias = functools.partial(unpadded, router._apply_expert_bias)
    return chunks


def finalize_gradients(chunks: list[Megatron], *arguments: object, **keywords: object) -> None:
    """Calls Megatron's function of this name, which must leave biases and their counts alone."""
    from megatron.core.distributed import finalize_model_grads

    settings = chunks[0].config
    has_biases = settings.moe_router_enable_expert_bias
    settings.moe_router_enable_expert_bias = False
    finalize_model_grads(chunks, *arguments, **keywords)
    settings.moe_router_enable_expert_bias = has_biases


def move_biases(chunks: list[Megatron]) -> None:
    """Moves the routers' biases by what was counted since the counts were 0; collective."""
    from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

    if moves_biases(chunks[0].config):
        _update_router_expert_bias(chunks, chunks[0].config)


def token_counts(chunks: Iterable[Megatron]) -> Iterator[Tensor]:
    """Yields each router's number of tokens by expert, if it has a bias."""
    # To look at every module takes longer than to zero the gradients of a small model.
    for chunk in (
        candidate for candidate in chunks if candidate.config.moe_router_enable_expert_bias
    ):
        for module in chunk.modules():
            if getattr(module, "local_tokens_per_expert", None) is not None:
                yield module.local_tokens_per_expert


def sparse_layers(chunk: Megatron) -> list[Megatron]:
    """Returns the layers of `chunk` with experts, as the first layers of some models are dense."""
    return [layer for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
