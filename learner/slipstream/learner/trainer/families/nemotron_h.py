"""A recipe for Nemotron-H, each of whose layers is either Mamba-2, attention or an MLP.

Importing this module after Bridge registers the recipe: see `compat.install`.
"""

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    MambaConv1dMapping,
    MambaInProjMapping,
    QKVMapping,
)
from megatron.core.activations import squared_relu
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.families.mappings import (
    ATTENTION,
    DECODER,
    FamilyBridge,
    place_norms,
    recipe_for,
    renamed,
)
from transformers import NemotronHForCausalLM

_LAYER = "backbone.layers.*."
_MIXER = f"{_LAYER}mixer."
# Kind of layer in config.json -> form of the layer, as in `spec.layer_spec`.
_FORMS = {"linear_attention": "mamba", "full_attention": "attention", "mlp": "mlp"}


@recipe_for(NemotronHForCausalLM, "nemotron_h")
class NemotronHBridge(FamilyBridge):
    """Nemotron-H: each layer has one norm and one block, which is Mamba, attention or an MLP.

    There are no position embeddings; MLPs use squared ReLU without a gate. Megatron Bridge's own
    recipe is for Megatron's Mamba layers. Source: arXiv:2504.03624, section 2.
    """

    # transformers' settings have numbers of experts for every model.
    CONFIG_MAPPING = (
        *(
            pair
            for pair in MegatronModelBridge.CONFIG_MAPPING
            if "moe" not in pair[1] and pair[1] != "mtp_num_layers"
        ),
        ("mamba_num_heads", "mamba_num_heads"),
        ("mamba_head_dim", "mamba_head_dim"),
        ("n_groups", "mamba_num_groups"),
        ("ssm_state_size", "mamba_state_dim"),
        ("conv_kernel", "linear_conv_kernel_dim"),
    )

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        provider.position_embedding_type = "none"
        provider.layernorm_epsilon = settings.layer_norm_epsilon
        provider.activation_func = squared_relu
        provider.gated_linear_unit = False
        # Checkpoints would otherwise join each parameter over all layers, but some layers lack it.
        provider.hetereogenous_dist_checkpoint = True
        provider.layer_forms = [_FORMS[kind] for kind in settings.layer_types]
        place_norms(provider, "before")

    def _mappings(self) -> list[Megatron]:
        pairs = {
            "embedding.word_embeddings.weight": "backbone.embeddings.weight",
            "output_layer.weight": "lm_head.weight",
            "decoder.final_layernorm.weight": "backbone.norm_f.weight",
            # A layer has one of these norms, under another name if it is fused into a matrix.
            f"{DECODER}input_layernorm.weight": f"{_LAYER}norm.weight",
            f"{ATTENTION}linear_qkv.layer_norm_weight": f"{_LAYER}norm.weight",
            f"{DECODER}pre_mlp_layernorm.weight": f"{_LAYER}norm.weight",
            f"{DECODER}mlp.linear_fc1.layer_norm_weight": f"{_LAYER}norm.weight",
            f"{ATTENTION}linear_proj.weight": f"{_MIXER}o_proj.weight",
            f"{DECODER}mlp.linear_fc1.weight": f"{_MIXER}up_proj.weight",
            f"{DECODER}mlp.linear_fc2.weight": f"{_MIXER}down_proj.weight",
            f"{ATTENTION}out_proj.weight": f"{_MIXER}out_proj.weight",
            f"{ATTENTION}norm_weight": f"{_MIXER}norm.weight",
        }
        pairs |= {f"{ATTENTION}{name}": f"{_MIXER}{name}" for name in ("A_log", "D", "dt_bias")}
        queries, keys, values = (f"{_MIXER}{name}_proj.weight" for name in ("q", "k", "v"))
        return [
            *renamed(pairs),
            QKVMapping(f"{ATTENTION}linear_qkv.weight", q=queries, k=keys, v=values),
            MambaInProjMapping(f"{ATTENTION}in_proj.weight", f"{_MIXER}in_proj.weight"),
            *(
                MambaConv1dMapping(f"{ATTENTION}conv1d.{kind}", f"{_MIXER}conv1d.{kind}")
                for kind in ("weight", "bias")
            ),
        ]
