"""A recipe for gpt-oss, whose attention has sinks and whose matrices have biases.

Importing this module after Bridge registers the recipe: see `compat.install`.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.gpt_oss.gpt_oss_bridge import (
    GPTOSSBridge,
    GPTOSSMLPDownProjMapping,
    GPTOSSMLPGateUpProjMapping,
)
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_model import GPTModel
from slipstream.learner.trainer.model.mappings import (
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
from torch import Tensor
from transformers import GptOssForCausalLM


@MegatronModelBridge.register_bridge(
    source=GptOssForCausalLM, target=GPTModel, model_type="gpt_oss"
)
class GptOssBridge(FamilyBridge):
    """gpt-oss: every second layer has windows; experts have biases and a limited activation.

    Bridge's own recipe has other windows and positions than the file says, and keeps every expert's
    weights in memory while it loads. Source: arXiv:2508.10925, section 2.
    """

    def __init__(self) -> None:
        super().__init__()
        # Tensors of all experts of a layer: the one that is being loaded, or those that are being
        # put together for export.
        self.hf_weights_cache: dict[str, Megatron] = {}

    def provider_bridge(self, hf_pretrained: Megatron) -> Megatron:
        """Returns Megatron's provider for the model of `hf_pretrained.config`."""
        provider = super().provider_bridge(hf_pretrained)
        settings = hf_pretrained.config
        provider.add_bias_linear = provider.add_qkv_bias = True
        provider.softmax_type = "learnable"
        provider.moe_ffn_hidden_size = settings.intermediate_size
        # Its slope of 1.702 is that of swiglu_alpha.
        provider.activation_func = quick_gelu
        # The one value of swiglu_limit that is taken; older files do not name it.
        provider.activation_func_clamp_value = 7.0
        provider.glu_linear_offset = 1.0
        place_norms(provider, "before")
        return provider

    def mapping_registry(self) -> Megatron:
        """Returns the map from Megatron's parameters to tensors of the files."""
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
        return MegatronMappingRegistry(
            *ends(), *norms_before(), *attention(biases=True), *renamed(pairs), *of_experts
        )

    def maybe_modify_loaded_hf_weight(
        self, hf_param: str | dict[str, str], hf_state_dict: Mapping[str, Tensor]
    ) -> Tensor | dict[str, Tensor]:
        """Returns what a parameter is made of; tensors of all experts are read once."""
        if not isinstance(hf_param, str):
            return {name: hf_state_dict[theirs] for name, theirs in hf_param.items()}
        if ".mlp.experts." not in hf_param:
            return hf_state_dict[hf_param]
        if hf_param not in self.hf_weights_cache:
            whole = hf_state_dict[hf_param]
            # The files have matrices as tokens are multiplied by them.
            self.hf_weights_cache = {hf_param: whole.mT if whole.dim() == 3 else whole}
        found: Tensor = self.hf_weights_cache[hf_param]
        return found

    # Puts the experts of all ranks together.
    maybe_modify_converted_hf_weight = GPTOSSBridge.maybe_modify_converted_hf_weight
