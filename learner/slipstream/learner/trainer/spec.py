"""Our layer spec without TransformerEngine: sequence-parallel RMSNorm, attention, experts.

It is defined by inheriting from Megatron's classes, so import it only after `compat.install`.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
import torch.nn.functional as F
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.models.qwen.qwen2_bridge import Qwen2Bridge
from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge
from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from slipstream.learner.trainer.experts import GroupedExperts
from slipstream.learner.trainer.settings import Megatron
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that works with sequence parallelism, which Megatron's own refuses."""

    def __init__(self, config: Megatron, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        device = torch.device("cpu") if config.use_cpu_initialization else None
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention of packed [tokens, heads, dim] or plain [sequence, batch, heads, dim]."""

    def __init__(
        self,
        config: Megatron,
        layer_number: int,
        attn_mask_type: Megatron,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Megatron = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Megatron = None,
    ) -> Tensor:
        """Returns [tokens, heads * dim], or [sequence, batch, heads * dim]."""
        if packed_seq_params is None:
            rows = [x.transpose(0, 1) for x in (query, key, value)]
            return self._attend(*rows).transpose(0, 1).flatten(2)
        bounds = tuple(packed_seq_params.cu_seqlens_q.tolist())
        groups, order = _length_groups(bounds, query.device)
        parts = []
        for positions, is_token in groups:
            rows = [
                x.index_select(0, positions.flatten()).view(*positions.shape, *x.shape[1:])
                for x in (query, key, value)
            ]
            parts.append(self._attend(*rows)[is_token])
        return torch.cat(parts).index_select(0, order).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Over dim 1 of [sequences, length, heads, dim]; padding at the end disturbs nobody."""
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=key.shape[2] != query.shape[2],
        )
        return attended.transpose(1, 2)


@functools.lru_cache(maxsize=16)
def _length_groups(
    bounds: tuple[int, ...], device: torch.device
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Sequences of similar length together, so that few and hardly padded calls serve all.

    For each group the token positions [sequences, longest] and which of them are tokens rather than
    padding; then where in the groups' tokens, one group after the other, each token of the packed
    sequence is found.
    """
    by_class: dict[int, list[tuple[int, int]]] = {}
    for start, end in itertools.pairwise(bounds):
        if end > start:
            by_class.setdefault((end - start - 1).bit_length(), []).append((start, end))
    groups = []
    for members in by_class.values():
        starts, ends = torch.tensor(members, device=device).unbind(1)
        steps = torch.arange(int((ends - starts).max()), device=device)
        positions = starts[:, None] + steps
        is_token = positions < ends[:, None]
        groups.append((torch.minimum(positions, ends[:, None] - 1), is_token))
    order = torch.cat([positions[is_token] for positions, is_token in groups]).argsort()
    return groups, order


def layer_spec(config: Megatron, vp_stage: int | None = None) -> Megatron:
    """The transformer block of `config`, for the layers of this pipeline stage."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    parts = layer.submodules
    if config.num_moe_experts:
        # Bridge cannot export Megatron's own, which are a list of modules.
        parts.mlp.submodules.experts = ModuleSpec(module=GroupedExperts)
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.submodules.core_attention = CoreAttention
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = RMSNorm
        parts.self_attention.submodules.k_layernorm = RMSNorm
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


@functools.cache
def register_norm_names() -> None:
    """Teaches Bridge's Qwen families the names of norms apart from the linear layer behind."""
    names = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    }
    for family in (Qwen2Bridge, Qwen3Bridge, Qwen3MoEBridge):
        original = family.mapping_registry

        def registry(self: Megatron, original: Megatron = original) -> Megatron:
            known = original(self).mappings
            have = {mapping.megatron_param for mapping in known}
            added = [
                AutoMapping(
                    megatron_param=f"decoder.layers.*.{ours}", hf_param=f"model.layers.*.{theirs}"
                )
                for ours, theirs in names.items()
                if f"decoder.layers.*.{ours}" not in have
            ]
            return MegatronMappingRegistry(*known, *added)

        family.mapping_registry = registry
