"""Recipes for text models that Megatron-Core can train and Bridge lacks, or gets wrong on CPUs.

A recipe turns config.json into Megatron's settings, and maps Megatron's parameters to tensors of
the files. Importing this module after Bridge registers the recipes: see `compat.install`.
"""

from collections.abc import Mapping
from types import SimpleNamespace

from megatron.bridge.models.gpt_oss.gpt_oss_bridge import (
    GPTOSSMLPDownProjMapping,
    GPTOSSMLPGateUpProjMapping,
)
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.families.mappings import (
    ATTENTION,
    DECODER,
    EXPERTS,
    LAYER,
    SHARED,
    FamilyBridge,
    attention,
    ends,
    experts,
    gated,
    norms_after,
    norms_before,
    place_norms,
    placed,
    recipe_for,
    renamed,
    scale_embeddings,
)
from torch import Tensor
from transformers import (
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Glm4MoeForCausalLM,
    Glm4MoeLiteForCausalLM,
    GptOssForCausalLM,
    MiniMaxM2ForCausalLM,
    Ministral3ForCausalLM,
    MistralForCausalLM,
    Olmo2ForCausalLM,
    SmolLM3ForCausalLM,
)

# Llamas with windows (arXiv:2310.06825, section 2) or YaRN. Bridge's own Mistral has windows of one
# token more than transformers and vLLM, and its Ministral 3 is the model with images.
for _source, _name in ((MistralForCausalLM, "mistral"), (Ministral3ForCausalLM, "ministral3")):
    recipe_for(_source, _name)(FamilyBridge)


@recipe_for(SmolLM3ForCausalLM, "smollm3")
class SmolLM3Bridge(FamilyBridge):
    """SmolLM3: a Llama some of whose layers have no positions. Source: transformers 5.19."""

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        have_rope = settings.no_rope_layers[: settings.num_hidden_layers]
        provider.no_rope_freq = [int(not has_rope) for has_rope in have_rope]


@recipe_for("MiMoForCausalLM", "mimo")
class MiMoBridge(FamilyBridge):
    """MiMo 7B: a Qwen2 without its layers for further tokens. Source: arXiv:2505.07608, 2.2."""

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        provider.add_qkv_bias = True
        provider.mtp_num_layers = None


@recipe_for(Gemma3ForCausalLM, "gemma3_text")
class Gemma3Bridge(FamilyBridge):
    """Gemma 3, text only: most layers have a sliding window and a rotary base of their own.

    Norms multiply by 1 + weight, and precede and follow attention and MLP. Embeddings are scaled by
    the root of the hidden size, attention scores by the inverse root of `query_pre_attn_scalar`.
    Source: arXiv:2503.19786, section 2.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        provider.layernorm_zero_centered_gamma = True
        provider.softmax_scale = settings.query_pre_attn_scalar**-0.5
        provider.share_embeddings_and_output_weights = True
        provider.qk_layernorm = True
        place_norms(provider, "around")
        scale_embeddings(provider, settings.hidden_size**0.5)

    def _mappings(self) -> list[Megatron]:
        norms = [*norms_before(mlp="pre_feedforward_layernorm"), *norms_after()]
        return [*ends(), *norms, *attention(), *gated()]


@recipe_for(Olmo2ForCausalLM, "olmo2")
class Olmo2Bridge(FamilyBridge):
    """OLMo 2: norms after attention and MLP, two over all heads. Source: arXiv:2501.00656, 3.1."""

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        place_norms(provider, "after", whole=True)

    def _mappings(self) -> list[Megatron]:
        return [*ends(), *norms_after(), *attention(), *gated()]


def _score_by_sigmoid(provider: Megatron) -> None:
    """Gives the router sigmoid scores, and biases that affect only the choice of experts."""
    provider.moe_router_score_function = "sigmoid"
    provider.moe_router_enable_expert_bias = True
    provider.moe_router_bias_update_rate = 0.0


def _expert_bias(theirs: str) -> list[Megatron]:
    return renamed({f"{DECODER}mlp.router.expert_bias": f"{LAYER}{theirs}.e_score_correction_bias"})


class _SigmoidBridge(FamilyBridge):
    """Decoders with first dense layers, shared experts, and a router with sigmoid scores."""

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        dense = settings.first_k_dense_replace
        provider.moe_layer_freq = [0] * dense + [1] * (settings.num_hidden_layers - dense)
        shared = settings.moe_intermediate_size * settings.n_shared_experts
        provider.moe_shared_expert_intermediate_size = shared
        provider.mtp_num_layers = None
        place_norms(provider, "before")
        _score_by_sigmoid(provider)

    def _feed_forward(self) -> list[Megatron]:
        shared = [*gated(SHARED, f"{LAYER}mlp.shared_experts."), *_expert_bias("mlp.gate")]
        return [*gated(), *experts(), *shared]


@recipe_for(MiniMaxM2ForCausalLM, "minimax_m2")
class MiniMaxM2Bridge(FamilyBridge):
    """MiniMax M2: sigmoid scores, norms over all heads. Source: transformers 5.19."""

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        provider.moe_ffn_hidden_size = settings.intermediate_size
        _score_by_sigmoid(provider)
        place_norms(provider, "before", whole=True)

    def _feed_forward(self) -> list[Megatron]:
        mixture = "block_sparse_moe"
        return [*experts(f"{mixture}.", ("w1", "w3", "w2")), *_expert_bias(mixture)]


@recipe_for(Glm4MoeForCausalLM, "glm4_moe")
class Glm4MoeBridge(_SigmoidBridge):
    """GLM-4.5: rotary embeddings cover half of each head. Source: arXiv:2508.06471, 2.1."""

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        super()._adjust(provider, settings)
        provider.add_qkv_bias = settings.attention_bias
        provider.qk_layernorm = settings.use_qk_norm


@recipe_for(DeepseekV3ForCausalLM, "deepseek_v3", provider=MLAModelProvider)
class DeepseekV3Bridge(_SigmoidBridge):
    """DeepSeek V3, Moonlight and Kimi K2: latent attention. Source: arXiv:2412.19437, 2.1."""

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        super()._adjust(provider, settings)
        provider.multi_latent_attention = True
        # Bridge does not pass on None, and Megatron's default is 512.
        provider.q_lora_rank = settings.q_lora_rank
        provider.qk_layernorm = True

    def _attention(self) -> list[Megatron]:
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


@recipe_for("KimiK25ForConditionalGeneration", "kimi_k25", provider=MLAModelProvider)
class KimiK25Bridge(DeepseekV3Bridge):
    """Kimi K2.5 and K2.6 without their tower: a Kimi K2 in a folder. Source: transformers 5.19."""

    def provider_bridge(self, hf_pretrained: Megatron) -> Megatron:
        """Returns Megatron's provider for the decoder."""
        decoder = hf_pretrained.config.text_config
        return super().provider_bridge(SimpleNamespace(config=decoder))

    def _mappings(self) -> list[Megatron]:
        return placed(super()._mappings(), lambda name: f"language_model.{name}")


# The layers of GLM-4.7-Flash are those of DeepSeek V3.
recipe_for(Glm4MoeLiteForCausalLM, "glm4_moe_lite", provider=MLAModelProvider)(DeepseekV3Bridge)


@recipe_for(GptOssForCausalLM, "gpt_oss")
class GptOssBridge(FamilyBridge):
    """gpt-oss: every second layer has a sliding window; experts have biases and a clamped SwiGLU.

    Bridge's own recipe has other windows and positions than config.json specifies.
    Source: arXiv:2508.10925, section 2.
    """

    def maybe_modify_loaded_hf_weight(
        self, hf_param: str | dict[str, str], hf_state_dict: Mapping[str, Tensor]
    ) -> Megatron:
        """Returns a parameter's tensors from the files; their matrices of experts are transposed.

        Bridge's mappings turn gate and up projections back only if these are not square.
        """
        tensors = super().maybe_modify_loaded_hf_weight(hf_param, hf_state_dict)
        return tensors.mT if isinstance(tensors, Tensor) and tensors.dim() == 3 else tensors

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        provider.add_bias_linear = provider.add_qkv_bias = True
        provider.softmax_type = "learnable"
        provider.moe_ffn_hidden_size = settings.intermediate_size
        # The slope is 1.702, like swiglu_alpha.
        provider.activation_func = quick_gelu
        # The only supported value of swiglu_limit; older files do not name it.
        provider.activation_func_clamp_value = 7.0
        provider.glu_linear_offset = 1.0
        place_norms(provider, "before")

    def _attention(self) -> list[Megatron]:
        pairs = {
            f"{ATTENTION}linear_proj.bias": f"{LAYER}self_attn.o_proj.bias",
            f"{ATTENTION}core_attention.softmax_offset": f"{LAYER}self_attn.sinks",
        }
        return [*attention(), *renamed(pairs)]

    def _feed_forward(self) -> list[Megatron]:
        router = f"{DECODER}mlp.router."
        theirs = f"{LAYER}mlp."
        pairs = {
            f"{router}weight": f"{theirs}router.weight",
            f"{router}bias": f"{theirs}router.bias",
        }
        of_experts = [
            kind(megatron_param=f"{EXPERTS}{ours}*", hf_param=f"{theirs}experts.{name}")
            for kind, ours, name in (
                (GPTOSSMLPGateUpProjMapping, "linear_fc1.weight", "gate_up_proj"),
                (GPTOSSMLPGateUpProjMapping, "linear_fc1.bias", "gate_up_proj_bias"),
                (GPTOSSMLPDownProjMapping, "linear_fc2.weight", "down_proj"),
                (GPTOSSMLPDownProjMapping, "linear_fc2.bias", "down_proj_bias"),
            )
        ]
        return [*renamed(pairs), *of_experts]
