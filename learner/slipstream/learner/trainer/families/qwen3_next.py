"""Recipes for Qwen3-Next, and for Qwen3.5, which has the same layers and Qwen3-VL's tower.

Importing this module after Bridge registers the recipes: see `compat.install`.
"""

from megatron.bridge.models.conversion.param_mapping import (
    GDNConv1dMapping,
    GDNLinearMapping,
    GDNLinearMappingSeparate,
)
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.families.mappings import (
    ATTENTION,
    LAYER,
    FamilyBridge,
    attention,
    experts,
    fused_experts,
    place_norms,
    recipe_for,
    renamed,
    shared_expert,
)
from slipstream.learner.trainer.families.vision import VisionBridge
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

# The folder of a delta net in the files.
DELTA_NET = f"{LAYER}linear_attn."
_SIZES = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")


@recipe_for(Qwen3_5ForCausalLM, "qwen3_5_text")
class Qwen35Bridge(FamilyBridge):
    """Qwen3.5 without images: delta nets (arXiv:2412.06464), gated attention, gated MLPs."""

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        # The model's norms multiply by 1 + weight, and its further layers are not trained.
        provider.layernorm_zero_centered_gamma = True
        provider.qk_layernorm = True
        provider.attention_output_gate = True
        provider.mtp_num_layers = None
        for name in _SIZES:
            setattr(provider, f"linear_{name}", getattr(settings, f"linear_{name}"))
        # Checkpoints would otherwise join each parameter over all layers, but some layers lack it.
        provider.hetereogenous_dist_checkpoint = True
        provider.is_delta_net = [kind == "linear_attention" for kind in settings.layer_types]
        place_norms(provider, "before")

    def _attention(self) -> list[Megatron]:
        pairs = {
            f"{ATTENTION}{ours}": f"{DELTA_NET}{name}"
            for ours, name in (
                ("A_log", "A_log"),
                ("dt_bias", "dt_bias"),
                ("out_norm.weight", "norm.weight"),
                ("out_proj.weight", "out_proj.weight"),
            )
        }
        convolution = GDNConv1dMapping(f"{ATTENTION}conv1d.weight", f"{DELTA_NET}conv1d.weight")
        return [*attention(), *renamed(pairs), convolution, self._inputs()]

    def _inputs(self) -> Megatron:
        names = {name: f"{DELTA_NET}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")}
        return GDNLinearMappingSeparate(f"{ATTENTION}in_proj.weight", **names)


@recipe_for(Qwen3_5MoeForCausalLM, "qwen3_5_moe_text")
class Qwen35MixtureBridge(Qwen35Bridge):
    """Qwen3.5 with experts, one shared by all tokens; files hold each expert separately."""

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        super()._adjust(provider, settings)
        provider.moe_shared_expert_intermediate_size = settings.shared_expert_intermediate_size
        provider.moe_shared_expert_gate = True

    def _feed_forward(self) -> list[Megatron]:
        return [*experts(), *shared_expert()]


@recipe_for(Qwen3NextForCausalLM, "qwen3_next")
class Qwen3NextBridge(Qwen35MixtureBridge):
    """Qwen3-Next, whose files join the input projections of a delta net in two tensors."""

    def _inputs(self) -> Megatron:
        return GDNLinearMapping(
            f"{ATTENTION}in_proj.weight",
            qkvz=f"{DELTA_NET}in_proj_qkvz.weight",
            ba=f"{DELTA_NET}in_proj_ba.weight",
        )


@recipe_for(Qwen3_5ForConditionalGeneration, "qwen3_5")
class Qwen35VisionBridge(Qwen35Bridge, VisionBridge):
    """Qwen3.5: a tower like Qwen3-VL's, without DeepStack features."""

    tower = Qwen3_5VisionModel


@recipe_for(Qwen3_5MoeForConditionalGeneration, "qwen3_5_moe")
class Qwen35VisionMixtureBridge(Qwen35MixtureBridge, VisionBridge):
    """Qwen3.5 with a tower; the files hold a layer's experts in one tensor, not transposed."""

    tower = Qwen3_5MoeVisionModel

    def _feed_forward(self) -> list[Megatron]:
        return [*fused_experts(is_turned=False), *shared_expert()]
