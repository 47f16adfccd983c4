"""The layer specifications of a model: Megatron's, with our own parts where Megatron lacks one.

This module imports classes that inherit from Megatron's, so import it only after `compat.install`.
"""

import functools
from dataclasses import replace

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from slipstream.core.extension import resolve
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.layers import mlp_parts
from slipstream.learner.trainer.layers.attention import CoreAttention
from slipstream.learner.trainer.layers.experts import GroupedExperts
from slipstream.learner.trainer.layers.norms import (
    NormedResidual,
    RMSNorm,
    WholeNorm,
    WholeNormAttention,
)
from slipstream.learner.trainer.layers.recurrent import PackedDeltaNet, PlainNorm
from slipstream.learner.trainer.ranks import compat


def layer_spec(config: Megatron, vp_stage: int | None = None) -> Megatron:
    """Returns the spec of the transformer block of `config`, with this pipeline stage's layers."""
    is_equal = getattr(config, "agreement", "close") == "bits"
    has_te = compat.has_transformer_engine() and not is_equal
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=has_te, normalization=config.normalization, vp_stage=vp_stage
    )
    norm: Megatron = RMSNorm
    if has_te:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    # Layers of one kind share their spec.
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        if config.softmax_type != "vanilla":
            # TransformerEngine's attention has no sinks for packed sequences.
            layer.submodules.self_attention.submodules.core_attention = CoreAttention
        if not has_te:
            _replace_parts(layer.submodules, config)
        elif getattr(config, "has_adapted_experts", False):
            # TransformerEngine's experts are one module, to which Bridge gives one adapter.
            mlp_parts(layer.submodules).experts = GroupedExperts
        _place_norms(layer.submodules, config, norm)
    for layer_parts in getattr(config, "layer_parts", ()):
        norm = resolve(layer_parts)(block, _places(config, vp_stage))
    is_delta_net = getattr(config, "is_delta_net", None)
    if is_delta_net is not None:
        linear_in = ColumnParallelLinear
        linear_out = RowParallelLinear
        if compat.has_transformer_engine():
            from megatron.core.extensions.transformer_engine import (
                TEColumnParallelLinear,
                TERowParallelLinear,
            )

            linear_in = TEColumnParallelLinear
            linear_out = TERowParallelLinear
        inner = GatedDeltaNetSubmodules(in_proj=linear_in, out_norm=PlainNorm, out_proj=linear_out)
        mixer = ModuleSpec(module=PackedDeltaNet, submodules=inner)
        for number, place in enumerate(_places(config, vp_stage)):
            if is_delta_net[place]:
                layer = block.layer_specs[number]
                parts = replace(layer.submodules, self_attention=mixer, input_layernorm=norm)
                block.layer_specs[number] = replace(layer, submodules=parts)
    block.layer_norm = norm
    return block


def _places(config: Megatron, vp_stage: int | None) -> range:
    """Returns the indices of this pipeline stage's layers in the whole model, from 0."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))


def _replace_parts(parts: Megatron, config: Megatron) -> None:
    """Replaces the parts of a layer that Megatron cannot compute without TransformerEngine."""
    if hasattr(mlp_parts(parts), "experts"):
        # Bridge cannot export Megatron's own experts, which are a list of modules.
        mlp_parts(parts).experts = GroupedExperts
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = CoreAttention
    if not config.qk_layernorm:
        return
    attention.q_layernorm = RMSNorm
    if isinstance(attention, MLASelfAttentionSubmodules):
        attention.kv_layernorm = RMSNorm
    else:
        attention.k_layernorm = RMSNorm


def _place_norms(parts: Megatron, config: Megatron, norm: Megatron) -> None:
    """Puts norms into a layer's spec at the places that `mappings.place_norms` set."""
    attention = parts.self_attention.submodules
    if getattr(config, "has_whole_norms", False):
        queries = config.num_attention_heads
        keys = config.num_query_groups
        parts.self_attention = replace(parts.self_attention, module=WholeNormAttention)
        attention.q_layernorm = functools.partial(WholeNorm, heads=queries)
        attention.k_layernorm = functools.partial(WholeNorm, heads=keys)
    place = getattr(config, "norm_place", "before")
    if place == "before":
        return
    parts.self_attn_bda = parts.mlp_bda = ModuleSpec(
        module=NormedResidual, params={"config": config, "norm": norm}
    )
    if place == "after":
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        if compat.has_transformer_engine():
            # Megatron's layers have these norms inside the matrices.
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

            attention.linear_qkv = mlp_parts(parts).linear_fc1 = TEColumnParallelLinear
