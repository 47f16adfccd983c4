"""Losses of routers that act alike in every parallel layout, and count no padding.

With `calculate_per_token_loss` Megatron multiplies these losses by the tokens of one rank, and sums
their gradients over the ranks that share a micro batch. So they would act 1 / (tp * cp) as
strongly. Here they are multiplied by the tokens of the whole micro batch.
"""

import functools
from typing import Any

import numpy as np
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.layers.router_replay import sparse_layers
from torch import Tensor


def has_router_losses(settings: Megatron) -> bool:
    """Returns whether `settings`, Megatron's settings of a model, give its routers a loss."""
    return bool(np.any(settings.moe_aux_loss_coeff) or settings.moe_z_loss_coeff)


def count_tokens_once(chunks: list[Megatron]) -> list[Megatron]:
    """Makes the losses of routers those of all tokens of a micro batch; returns `chunks`."""
    for chunk in chunks:
        for layer in sparse_layers(chunk):
            router = layer.mlp.router
            # A packed micro batch is one sequence to Megatron, so both losses are the same.
            router._apply_aux_loss = functools.partial(_balanced, router, "aux_loss")
            router._apply_seq_aux_loss = functools.partial(_balanced, router, "seq_aux_loss")
            layer.register_forward_pre_hook(_mask_padding, with_kwargs=True)
    return chunks


def _balanced(
    router: Megatron,
    kind: str,
    probs: Tensor,
    scores: Tensor,
    routing_map: Tensor,
    *_: object,
    **__: object,
) -> Tensor:
    """Returns `probs` with the loss of `kind` attached, as Megatron's methods of a router do.

    `scores` and `routing_map` are 0 for padding; a micro batch of padding alone has no loss.
    """
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    coefficient = router.get_aux_loss_coeff(kind)
    if not coefficient:
        return probs
    group = router.tp_cp_group
    counts = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), group)
    num_tokens = counts.sum() / router.topk
    loss = switch_load_balancing_loss_func(
        probs=scores,
        tokens_per_expert=counts,
        total_num_tokens=num_tokens.clamp(min=1),
        topk=router.topk,
        num_experts=router.config.num_moe_experts,
        moe_aux_loss_coeff=coefficient,
        fused=router.config.moe_router_fusion,
    )
    attached: Tensor = router.attach_and_log_load_balancing_loss(
        probs, coefficient, loss, kind, group, valid_token_count=num_tokens
    )
    return attached


def _mask_padding(
    layer: Megatron, arguments: tuple[object, ...], named: dict[str, Any]
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Gives a layer Megatron's mask of padding, [1, tokens], for this rank's tokens."""
    mask = named["packed_seq_params"].is_padding
    if layer.config.sequence_parallel:
        size = len(mask) // layer.config.tensor_model_parallel_size
        mask = mask[layer.mlp.tp_group.rank() * size :][:size]
    return arguments, named | {"padding_mask": mask[None]}
