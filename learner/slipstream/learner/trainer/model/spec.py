"""The layer spec without TransformerEngine: sequence-parallel RMSNorm, attention, experts.

Importing it imports classes that inherit from Megatron's, so do it only after `compat.install`.
"""

from __future__ import annotations

import functools

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.models.qwen.qwen2_bridge import Qwen2Bridge
from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge
from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from slipstream.learner.trainer.model.attention import CoreAttention
from slipstream.learner.trainer.model.experts import GroupedExperts
from slipstream.learner.trainer.untyped import Megatron


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that works with sequence parallelism, which Megatron's own refuses."""

    def __init__(self, config: Megatron, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        device = torch.device("cpu") if config.use_cpu_initialization else None
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def layer_spec(config: Megatron, vp_stage: int | None = None) -> Megatron:
    """Returns the transformer block of `config` with the layers of this pipeline stage."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    parts = layer.submodules
    if config.num_moe_experts:
        # Bridge cannot export Megatron's own experts, which are a list of modules.
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
    """Adds names of separate norms to Bridge's Qwen families, which know only fused norms."""
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
