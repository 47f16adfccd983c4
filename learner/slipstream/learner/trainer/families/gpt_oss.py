"""A recipe for gpt-oss, whose attention has sinks and whose matrices have biases.

Importing this module after Bridge registers the recipe: see `compat.install`.
"""

from __future__ import annotations

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.gpt_oss.gpt_oss_bridge import (
    GPTOSSMLPDownProjMapping,
    GPTOSSMLPGateUpProjMapping,
)
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_model import GPTModel
from slipstream.learner.trainer.families.fused_experts import FusedExperts
from slipstream.learner.trainer.families.mappings import (
    ATTENTION,
    DECODER,
    EXPERTS,
    LAYER,
    FamilyBridge,
    attention,
    ends,
    norms_before,
    place_norms,
    renamed,
)
from slipstream.learner.trainer.untyped import Megatron
from transformers import GptOssForCausalLM


@MegatronModelBridge.register_bridge(
    source=GptOssForCausalLM, target=GPTModel, model_type="gpt_oss"
)
class GptOssBridge(FusedExperts, FamilyBridge):
    """gpt-oss: every second layer has windows; experts have biases and a limited activation.

    Bridge's own recipe has other windows and positions than the file says, and keeps every expert's
    weights in memory while it loads. Source: arXiv:2508.10925, section 2.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        super()._adjust(provider, settings)
        provider.add_bias_linear = provider.add_qkv_bias = True
        provider.softmax_type = "learnable"
        provider.moe_ffn_hidden_size = settings.intermediate_size
        # Its slope of 1.702 is that of swiglu_alpha.
        provider.activation_func = quick_gelu
        # The one value of swiglu_limit that is taken; older files do not name it.
        provider.activation_func_clamp_value = 7.0
        provider.glu_linear_offset = 1.0
        place_norms(provider, "before")

    def _mappings(self) -> list[Megatron]:
        router, theirs = f"{DECODER}mlp.router.", f"{LAYER}mlp."
        pairs = {
            f"{ATTENTION}linear_proj.bias": f"{LAYER}self_attn.o_proj.bias",
            f"{ATTENTION}core_attention.softmax_offset": f"{LAYER}self_attn.sinks",
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
        return [*ends(), *norms_before(), *attention(biases=True), *renamed(pairs), *of_experts]
