"""Losses of routers that count no padding.

The losses act alike in every parallel layout. Megatron multiplies such a loss by the tokens of one
rank and by the number of ranks that share a micro batch. That is the number of its tokens only
while none of them is padding.
"""

import importlib
from typing import Any

import numpy as np
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.ranks.cpu import substitute
from torch import Tensor


def has_router_losses(settings: Megatron) -> bool:
    """Returns whether `settings`, Megatron's settings of a model, give its routers a loss."""
    return bool(np.any(settings.moe_aux_loss_coeff) or settings.moe_z_loss_coeff)


def count_tokens_once(chunks: list[Megatron]) -> list[Megatron]:
    """Makes the losses of routers those of all tokens of a micro batch; returns `chunks`."""
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    def token_counts(
        routing_map: Tensor, reduce_group: Megatron, topk: int, **_: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Each expert's tokens in the ranks of the group, a rank's share, and all tokens. The map
        # [tokens, experts] is 0 for padding; a micro batch of padding alone has no loss.
        by_expert = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), reduce_group)
        total = (by_expert.sum() / topk).clamp(min=1)
        return by_expert, total / reduce_group.size(), total

    def mask_padding(
        layer: Megatron, arguments: tuple[object, ...], named: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]]:
        mask = named["packed_seq_params"].is_padding
        if layer.config.sequence_parallel:
            size = len(mask) // layer.config.tensor_model_parallel_size
            mask = mask[layer.mlp.tp_group.rank() * size :][:size]
        return arguments, named | {"padding_mask": mask[None]}

    router: Megatron = importlib.import_module("megatron.core.transformer.moe.router")
    substitute(router, {"get_tokens_per_expert_and_token_count": token_counts})
    for chunk in chunks:
        for layer in sparse_layers(chunk):
            layer.register_forward_pre_hook(mask_padding, with_kwargs=True)
    return chunks


def sparse_layers(chunk: Megatron) -> list[Megatron]:
    """Returns the layers of `chunk` with experts, as the first layers of some models are dense."""
    return [layer for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
