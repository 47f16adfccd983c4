"""A recipe for Qwen3-Next, most of whose layers have a gated delta net in place of attention.

Importing this module after Bridge registers the recipe: see `compat.install`.
"""

from __future__ import annotations

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    GDNConv1dMapping,
    GDNLinearMapping,
    ReplicatedMapping,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from slipstream.learner.trainer.model.mappings import (
    ATTENTION,
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
from slipstream.learner.trainer.untyped import Megatron
from transformers import Qwen3NextForCausalLM

_SIZES = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")


@MegatronModelBridge.register_bridge(
    source=Qwen3NextForCausalLM, target=GPTModel, model_type="qwen3_next"
)
class Qwen3NextBridge(FamilyBridge):
    """Qwen3-Next: delta nets; gated attention; a mixture of experts like Qwen2-MoE's.

    Norms multiply by 1 + weight. Layers that predict further tokens are neither loaded nor
    exported. Source: arXiv:2412.06464 for the delta net, transformers for the rest.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        provider.layernorm_zero_centered_gamma = True
        provider.qk_layernorm = True
        provider.attention_output_gate = True
        provider.moe_shared_expert_intermediate_size = settings.shared_expert_intermediate_size
        provider.moe_shared_expert_gate = True
        provider.mtp_num_layers = None
        for name in _SIZES:
            setattr(provider, f"linear_{name}", getattr(settings, f"linear_{name}"))
        # Checkpoints would otherwise join a parameter of all layers, which not all have.
        provider.hetereogenous_dist_checkpoint = True
        provider.has_delta_net = [kind == "linear_attention" for kind in settings.layer_types]
        place_norms(provider, "before")

    def _mappings(self) -> list[Megatron]:
        theirs = f"{LAYER}linear_attn."
        pairs = {
            f"{ATTENTION}{ours}": f"{theirs}{name}"
            for ours, name in (
                ("A_log", "A_log"),
                ("dt_bias", "dt_bias"),
                ("out_norm.weight", "norm.weight"),
                ("out_proj.weight", "out_proj.weight"),
            )
        }
        return [
            *ends(),
            *norms_before(),
            *attention(normed_heads=True),
            *renamed(pairs),
            GDNConv1dMapping(f"{ATTENTION}conv1d.weight", f"{theirs}conv1d.weight"),
            GDNLinearMapping(
                f"{ATTENTION}in_proj.weight",
                qkvz=f"{theirs}in_proj_qkvz.weight",
                ba=f"{theirs}in_proj_ba.weight",
            ),
            *experts(),
            *gated(SHARED, f"{LAYER}mlp.shared_expert."),
            ReplicatedMapping(
                megatron_param=f"{SHARED}gate_weight",
                hf_param=f"{LAYER}mlp.shared_expert_gate.weight",
            ),
        ]
