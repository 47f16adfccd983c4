"""Recipes for Qwen3-Next, and for Qwen3.5, which has the same layers and Qwen3-VL's tower.

Importing this module after Bridge registers the recipes: see `compat.install`.
"""

from collections.abc import Iterable

from megatron.bridge.models.conversion.param_mapping import (
    GDNConv1dMapping,
    GDNLinearMapping,
    GDNLinearMappingSeparate,
    split_gdn_linear_weights,
)
from megatron.core import parallel_state
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
from torch import Tensor
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

# The input projections of a delta net in files that join them in two tensors.
_JOINED_INPUTS = ("in_proj_qkvz", "in_proj_ba")
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

    def _merge_lora_adapter_weights(
        self,
        megatron_model: Megatron,
        converted_weights_dict: dict[str, Tensor],
        adapter_weights: Megatron,
    ) -> dict[str, Tensor]:
        """Returns the files' matrices with adapters merged, the joined inputs too."""
        (adapter,) = adapter_weights
        second = adapter.linear_out_weight.weight
        parts = _joined_parts(megatron_model[0].config, converted_weights_dict, second)
        if not parts:
            merged: dict[str, Tensor] = super()._merge_lora_adapter_weights(
                megatron_model, converted_weights_dict, adapter_weights
            )
            return merged
        first = adapter.linear_in_weight.weight
        return {
            name: self._merge_single_adapter_weight(
                weight, adapter.alpha, adapter.dim, first, parts[name]
            )
            for name, weight in converted_weights_dict.items()
        }

    def _get_fused_adapter_linear_out_slices(
        self,
        megatron_model: Megatron,
        base_hf_weight_names: list[str],
        linear_out_tensor: Tensor,
        is_expert: bool = False,
    ) -> dict[str, Tensor] | None:
        """Returns lora_B by the files' matrices; None for one that is a single matrix there."""
        config = megatron_model[0].config
        parts = _joined_parts(config, base_hf_weight_names, linear_out_tensor)
        if parts:
            return parts
        slices: dict[str, Tensor] | None = super()._get_fused_adapter_linear_out_slices(
            megatron_model, base_hf_weight_names, linear_out_tensor, is_expert
        )
        return slices


def _joined_parts(config: Megatron, names: Iterable[str], rows: Tensor) -> dict[str, Tensor]:
    """Splits `rows` of a delta net's `in_proj` into the files' joined tensors among `names`.

    Returns {} for names of another matrix. `rows` has the rows of all tensor parallel ranks, with
    any number of columns.
    """
    joined = [name for kind in _JOINED_INPUTS for name in names if name.endswith(f".{kind}.weight")]
    if not joined:
        return {}
    num_ranks = parallel_state.get_tensor_model_parallel_world_size()
    parts = split_gdn_linear_weights(config, rows, tp_size=num_ranks, feature_dim=rows.shape[1])
    return dict(zip(joined, parts, strict=True))


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
