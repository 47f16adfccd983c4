"""Recipes for mixtures of experts with dense first layers and shared experts for every token.

The router of some scores with a sigmoid and a bias for each expert. The biases choose experts only:
they get no gradient, and stay as the checkpoint has them. Layers that predict further tokens are
neither loaded nor exported.
Importing this module after Bridge registers the recipes: see `compat.install`.
"""

from __future__ import annotations

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.core.models.gpt.gpt_model import GPTModel
from slipstream.learner.trainer.families.mappings import (
    ATTENTION,
    DECODER,
    LAYER,
    SHARED,
    FamilyBridge,
    attention,
    ends,
    experts,
    gated,
    norms_before,
    place_norms,
    renamed,
)
from slipstream.learner.trainer.layers.router_replay import choose_groups_by_best
from slipstream.learner.trainer.untyped import Megatron
from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeForCausalLM


class _SharedBridge(FamilyBridge):
    """The layers that the families share."""

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        dense = settings.first_k_dense_replace
        provider.moe_layer_freq = [0] * dense + [1] * (settings.num_hidden_layers - dense)
        provider.moe_shared_expert_intermediate_size = (
            settings.moe_intermediate_size * settings.n_shared_experts
        )
        provider.mtp_num_layers = None
        place_norms(provider, "before")

    def _mappings(self) -> list[Megatron]:
        return [
            *ends(),
            *norms_before(),
            *gated(f"{DECODER}mlp.", f"{LAYER}mlp."),
            *experts(),
            *gated(SHARED, f"{LAYER}mlp.shared_experts."),
        ]


class _SigmoidBridge(_SharedBridge):
    """A router that scores with a sigmoid and has a bias for each expert."""

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        super()._adjust(provider, settings)
        provider.moe_router_score_function = "sigmoid"
        provider.moe_router_enable_expert_bias = True
        provider.moe_router_bias_update_rate = 0.0

    def _mappings(self) -> list[Megatron]:
        bias = f"{LAYER}mlp.gate.e_score_correction_bias"
        return [*super()._mappings(), *renamed({f"{DECODER}mlp.router.expert_bias": bias})]


@MegatronModelBridge.register_bridge(
    source=Glm4MoeForCausalLM, target=GPTModel, model_type="glm4_moe"
)
class Glm4MoeBridge(_SigmoidBridge):
    """GLM-4.5: positions turn half of each head.

    Source: arXiv:2508.06471, section 2.1.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        super()._adjust(provider, settings)
        provider.add_qkv_bias = settings.attention_bias
        provider.qk_layernorm = settings.use_qk_norm

    def _mappings(self) -> list[Megatron]:
        return [*super()._mappings(), *attention(biases=True, normed_heads=True)]


def _make_latent(provider: Megatron, settings: Megatron) -> None:
    """Gives the model of `provider` latent attention."""
    provider.multi_latent_attention = True
    # Bridge leaves out what is None, and Megatron's own value is 512.
    provider.q_lora_rank = settings.q_lora_rank
    provider.qk_layernorm = True


def _latent_attention() -> list[Megatron]:
    """Returns the mappings of the matrices and norms of latent attention."""
    theirs = f"{LAYER}self_attn."
    pairs = {
        f"{ATTENTION}linear_proj.weight": f"{theirs}o_proj.weight",
        f"{ATTENTION}linear_q_proj.weight": f"{theirs}q_proj.weight",
        f"{ATTENTION}linear_q_down_proj.weight": f"{theirs}q_a_proj.weight",
        f"{ATTENTION}linear_q_up_proj.weight": f"{theirs}q_b_proj.weight",
        f"{ATTENTION}linear_kv_down_proj.weight": f"{theirs}kv_a_proj_with_mqa.weight",
        f"{ATTENTION}linear_kv_up_proj.weight": f"{theirs}kv_b_proj.weight",
        # A norm has one of two names: TransformerEngine's layers fuse it into the matrix.
        f"{ATTENTION}q_layernorm.weight": f"{theirs}q_a_layernorm.weight",
        f"{ATTENTION}linear_q_up_proj.layer_norm_weight": f"{theirs}q_a_layernorm.weight",
        f"{ATTENTION}kv_layernorm.weight": f"{theirs}kv_a_layernorm.weight",
        f"{ATTENTION}linear_kv_up_proj.layer_norm_weight": f"{theirs}kv_a_layernorm.weight",
    }
    return renamed(pairs)


@MegatronModelBridge.register_bridge(
    source=DeepseekV3ForCausalLM,
    target=GPTModel,
    provider=MLAModelProvider,
    model_type="deepseek_v3",
)
class DeepseekV3Bridge(_SigmoidBridge):
    """DeepSeek V3 and Moonlight: keys and values come from a small latent vector of each token.

    Source: arXiv:2412.19437, section 2.1.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        super()._adjust(provider, settings)
        _make_latent(provider, settings)

    def _mappings(self) -> list[Megatron]:
        return [*super()._mappings(), *_latent_attention()]


@MegatronModelBridge.register_bridge(
    source=DeepseekV2ForCausalLM,
    target=GPTModel,
    provider=MLAModelProvider,
    model_type="deepseek_v2",
)
class DeepseekV2Bridge(_SharedBridge):
    """DeepSeek V2 and V2-Lite: latent attention; a group of experts is as good as its best expert.

    Megatron's score of a group is a sum over its best experts. Source: arXiv:2405.04434, section 2.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        super()._adjust(provider, settings)
        _make_latent(provider, settings)
        if settings.n_group > 1:
            provider.register_pre_wrap_hook(choose_groups_by_best)

    def _mappings(self) -> list[Megatron]:
        return [*super()._mappings(), *_latent_attention()]
