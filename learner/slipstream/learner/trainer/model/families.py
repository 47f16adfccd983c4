"""Recipes for mixtures of experts that Megatron-Core trains and Megatron-Bridge 0.3.1 lacks.

A recipe turns config.json into Megatron's settings and maps its parameters to tensors of the files.
Importing this module after Bridge registers the recipes: see `compat.install`.
"""

from __future__ import annotations

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    QKVMapping,
    ReplicatedMapping,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from slipstream.learner.trainer.untyped import Megatron
from transformers import MixtralForCausalLM, Qwen2MoeForCausalLM

_DECODER = "decoder.layers.*."
_LAYER = "model.layers.*."
_ATTENTION = f"{_DECODER}self_attention."
_EXPERTS = f"{_DECODER}mlp.experts."
_SHARED = f"{_DECODER}mlp.shared_experts."


def _common_mappings() -> list[Megatron]:
    """Returns the mappings of embedding, norms and attention.

    A norm has one of two names: TransformerEngine's layers fuse norms into the linear layer.
    """
    pairs = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        f"{_DECODER}input_layernorm.weight": f"{_LAYER}input_layernorm.weight",
        f"{_ATTENTION}linear_qkv.layer_norm_weight": f"{_LAYER}input_layernorm.weight",
        f"{_DECODER}pre_mlp_layernorm.weight": f"{_LAYER}post_attention_layernorm.weight",
        f"{_ATTENTION}linear_proj.weight": f"{_LAYER}self_attn.o_proj.weight",
    }
    mappings = [AutoMapping(megatron_param=ours, hf_param=theirs) for ours, theirs in pairs.items()]
    return [*mappings, _query_key_value("weight")]


def _query_key_value(kind: str) -> Megatron:
    return QKVMapping(
        megatron_param=f"{_ATTENTION}linear_qkv.{kind}",
        q=f"{_LAYER}self_attn.q_proj.{kind}",
        k=f"{_LAYER}self_attn.k_proj.{kind}",
        v=f"{_LAYER}self_attn.v_proj.{kind}",
    )


def _experts(router: str, gate: str, up: str, down: str) -> list[Megatron]:
    """Returns the mappings of the router and each expert, given the names in the files."""
    return [
        AutoMapping(megatron_param=f"{_DECODER}mlp.router.weight", hf_param=_LAYER + router),
        GatedMLPMapping(
            megatron_param=f"{_EXPERTS}linear_fc1.weight*", gate=_LAYER + gate, up=_LAYER + up
        ),
        AutoMapping(megatron_param=f"{_EXPERTS}linear_fc2.weight*", hf_param=_LAYER + down),
    ]


class _MixtureBridge(MegatronModelBridge):  # type: ignore[misc]
    """The settings that both families share."""

    def provider_bridge(self, hf_pretrained: Megatron) -> Megatron:
        provider = super().provider_bridge(hf_pretrained)
        provider.normalization = "RMSNorm"
        provider.gated_linear_unit = True
        provider.position_embedding_type = "rope"
        provider.add_bias_linear = False
        provider.add_qkv_bias = False
        provider.qk_layernorm = False
        provider.hidden_dropout = 0.0
        provider.autocast_dtype = torch.bfloat16
        provider.moe_grouped_gemm = True
        provider.moe_permute_fusion = True
        provider.moe_router_load_balancing_type = "aux_loss"
        provider.moe_token_dispatcher_type = "alltoall"
        return provider


@MegatronModelBridge.register_bridge(
    source=MixtralForCausalLM, target=GPTModel, model_type="mixtral"
)
class MixtralBridge(_MixtureBridge):
    """Mixtral: the weights of a token's experts are a softmax over these experts alone.

    Source: arXiv:2401.04088, section 2.1.
    """

    def provider_bridge(self, hf_pretrained: Megatron) -> Megatron:
        """Returns Megatron's provider for the model of `hf_pretrained.config`."""
        provider = super().provider_bridge(hf_pretrained)
        provider.moe_ffn_hidden_size = hf_pretrained.config.intermediate_size
        return provider

    def mapping_registry(self) -> Megatron:
        """Returns the map from Megatron's parameters to tensors of the files."""
        mixture = "block_sparse_moe."
        experts = f"{mixture}experts.*."
        return MegatronMappingRegistry(
            *_common_mappings(),
            *_experts(
                f"{mixture}gate.weight",
                f"{experts}w1.weight",
                f"{experts}w3.weight",
                f"{experts}w2.weight",
            ),
        )


@MegatronModelBridge.register_bridge(
    source=Qwen2MoeForCausalLM, target=GPTModel, model_type="qwen2_moe"
)
class Qwen2MoeBridge(_MixtureBridge):
    """Qwen2-MoE and Qwen1.5-MoE: every token also goes to one expert that has a gate of its own.

    Source: arXiv:2407.10671, section 2.2.2.
    """

    def provider_bridge(self, hf_pretrained: Megatron) -> Megatron:
        """Returns Megatron's provider for the model of `hf_pretrained.config`."""
        provider = super().provider_bridge(hf_pretrained)
        settings = hf_pretrained.config
        provider.add_qkv_bias = settings.qkv_bias
        provider.moe_shared_expert_intermediate_size = settings.shared_expert_intermediate_size
        provider.moe_shared_expert_gate = True
        return provider

    def mapping_registry(self) -> Megatron:
        """Returns the map from Megatron's parameters to tensors of the files."""
        experts, shared = "mlp.experts.*.", f"{_LAYER}mlp.shared_expert"
        return MegatronMappingRegistry(
            *_common_mappings(),
            _query_key_value("bias"),
            *_experts(
                "mlp.gate.weight",
                f"{experts}gate_proj.weight",
                f"{experts}up_proj.weight",
                f"{experts}down_proj.weight",
            ),
            GatedMLPMapping(
                megatron_param=f"{_SHARED}linear_fc1.weight",
                gate=f"{shared}.gate_proj.weight",
                up=f"{shared}.up_proj.weight",
            ),
            AutoMapping(
                megatron_param=f"{_SHARED}linear_fc2.weight", hf_param=f"{shared}.down_proj.weight"
            ),
            ReplicatedMapping(
                megatron_param=f"{_SHARED}gate_weight", hf_param=f"{shared}_gate.weight"
            ),
        )
