"""Recipes for families that Megatron-Core trains and Megatron-Bridge 0.3.1 lacks or gets wrong.

A recipe turns config.json into Megatron's settings and maps its parameters to tensors of the files.
Importing this module after Bridge registers the recipes: see `compat.install`.
"""

from __future__ import annotations

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping
from megatron.core.models.gpt.gpt_model import GPTModel
from slipstream.learner.trainer.families.mappings import (
    DECODER,
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
    scale_embeddings,
)
from slipstream.learner.trainer.untyped import Megatron
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Ministral3ForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    OlmoeForCausalLM,
    Qwen2MoeForCausalLM,
)


class _DenseBridge(FamilyBridge):
    """A Llama by its tensors."""

    def _mappings(self) -> list[Megatron]:
        return [*ends(), *norms_before(), *attention(), *gated(f"{DECODER}mlp.", f"{LAYER}mlp.")]


@MegatronModelBridge.register_bridge(
    source=MistralForCausalLM, target=GPTModel, model_type="mistral"
)
class MistralBridge(_DenseBridge):
    """Mistral: a Llama whose queries may see a window only.

    Bridge's own recipe has windows of one token more than transformers and vLLM.
    Source: arXiv:2310.06825, section 2.
    """


@MegatronModelBridge.register_bridge(
    source=Ministral3ForCausalLM, target=GPTModel, model_type="ministral3"
)
class Ministral3Bridge(_DenseBridge):
    """Ministral 3, its language model alone: a Llama with YaRN.

    Bridge's own recipe is for the model with images.
    """


class _GemmaBridge(FamilyBridge):
    """What Gemma 2 and 3 share.

    Norms multiply by 1 + weight and stand before and after attention and MLP. Embeddings are scaled
    by the root of the hidden size; scores by a number of config.json.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        provider.layernorm_zero_centered_gamma = True
        provider.softmax_scale = settings.query_pre_attn_scalar**-0.5
        provider.share_embeddings_and_output_weights = True
        place_norms(provider, "around")
        scale_embeddings(provider, settings.hidden_size**0.5)

    def _mappings(self) -> list[Megatron]:
        return [
            *ends(),
            *norms_before(mlp="pre_feedforward_layernorm"),
            *norms_after(attention="post_attention_layernorm", mlp="post_feedforward_layernorm"),
            *gated(f"{DECODER}mlp.", f"{LAYER}mlp."),
        ]


@MegatronModelBridge.register_bridge(source=Gemma2ForCausalLM, target=GPTModel, model_type="gemma2")
class Gemma2Bridge(_GemmaBridge):
    """Gemma 2: every second layer has windows; scores and logits are capped.

    Source: arXiv:2408.00118, section 2.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        super()._adjust(provider, settings)
        provider.score_cap = settings.attn_logit_softcapping
        provider.logit_cap = settings.final_logit_softcapping

    def _mappings(self) -> list[Megatron]:
        return [*super()._mappings(), *attention()]


@MegatronModelBridge.register_bridge(
    source=Gemma3ForCausalLM, target=GPTModel, model_type="gemma3_text"
)
class Gemma3Bridge(_GemmaBridge):
    """Gemma 3, text only: most layers have windows, with positions of their own.

    Source: arXiv:2503.19786, section 2.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        super()._adjust(provider, settings)
        provider.qk_layernorm = True

    def _mappings(self) -> list[Megatron]:
        return [*super()._mappings(), *attention(normed_heads=True)]


@MegatronModelBridge.register_bridge(source=Olmo2ForCausalLM, target=GPTModel, model_type="olmo2")
class Olmo2Bridge(FamilyBridge):
    """OLMo 2: norms after attention and MLP, not before; queries and keys are normed as a whole.

    Source: arXiv:2501.00656, section 3.1.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        place_norms(provider, "after", whole=True)

    def _mappings(self) -> list[Megatron]:
        return [
            *ends(),
            *norms_after(attention="post_attention_layernorm", mlp="post_feedforward_layernorm"),
            *attention(normed_heads=True),
            *gated(f"{DECODER}mlp.", f"{LAYER}mlp."),
        ]


@MegatronModelBridge.register_bridge(source=OlmoeForCausalLM, target=GPTModel, model_type="olmoe")
class OlmoeBridge(FamilyBridge):
    """OLMoE: a mixture of experts whose queries and keys are normed as a whole.

    Source: arXiv:2409.02060, section 2.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        provider.moe_ffn_hidden_size = settings.intermediate_size
        place_norms(provider, "before", whole=True)

    def _mappings(self) -> list[Megatron]:
        return [*ends(), *norms_before(), *attention(normed_heads=True), *experts()]


@MegatronModelBridge.register_bridge(
    source=MixtralForCausalLM, target=GPTModel, model_type="mixtral"
)
class MixtralBridge(FamilyBridge):
    """Mixtral: the weights of a token's experts are a softmax over these experts alone.

    Source: arXiv:2401.04088, section 2.1.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        provider.moe_ffn_hidden_size = settings.intermediate_size

    def _mappings(self) -> list[Megatron]:
        return [
            *ends(),
            *norms_before(),
            *attention(),
            *experts("block_sparse_moe.", ("w1", "w3", "w2")),
        ]


@MegatronModelBridge.register_bridge(
    source=Qwen2MoeForCausalLM, target=GPTModel, model_type="qwen2_moe"
)
class Qwen2MoeBridge(FamilyBridge):
    """Qwen2-MoE and Qwen1.5-MoE: every token also goes to one expert that has a gate of its own.

    Source: arXiv:2407.10671, section 2.2.2.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        provider.add_qkv_bias = settings.qkv_bias
        provider.moe_shared_expert_intermediate_size = settings.shared_expert_intermediate_size
        provider.moe_shared_expert_gate = True

    def _mappings(self) -> list[Megatron]:
        gate = ReplicatedMapping(
            megatron_param=f"{SHARED}gate_weight", hf_param=f"{LAYER}mlp.shared_expert_gate.weight"
        )
        return [
            *ends(),
            *norms_before(),
            *attention(biases=True),
            *experts(),
            *gated(SHARED, f"{LAYER}mlp.shared_expert."),
            gate,
        ]
