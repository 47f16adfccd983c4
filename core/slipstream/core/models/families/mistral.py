"""Mistral, Ministral 3, Mixtral, and the tower of Mistral 3."""

from slipstream.core.models.family import (
    DENSE,
    NONE,
    UNSHARED,
    Experts,
    Family,
    Nested,
    Shape,
    Table,
    blocks,
    linear,
    sizes_of_tower,
)

_TOWER = {
    "num_channels": 3,
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "patch_size": 16,
}
# Windows are in all layers or in none.
_VALUES = {**DENSE, "layer_types": NONE, "use_sliding_window": NONE}


def pixtral_tensors(values: Table) -> dict[str, Shape]:
    """Returns the tensors of a Pixtral tower and of the projector behind it."""
    sizes = sizes_of_tower(values, _TOWER)
    hidden, inner, side = sizes["hidden_size"], sizes["intermediate_size"], sizes["patch_size"]
    block = {
        "attention_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        **{f"attention.{name}_proj.weight": (hidden, hidden) for name in "qkvo"},
        "feed_forward.gate_proj.weight": (inner, hidden),
        "feed_forward.up_proj.weight": (inner, hidden),
        "feed_forward.down_proj.weight": (hidden, inner),
    }
    tower = {
        "patch_conv.weight": (hidden, sizes["num_channels"], side, side),
        "ln_pre.weight": (hidden,),
        **blocks(sizes["num_hidden_layers"], "transformer.layers", block),
    }
    outer, merge = values["hidden_size"], values.get("spatial_merge_size", 2)
    projector = {
        "norm.weight": (hidden,),
        "patch_merger.merging_layer.weight": (hidden, hidden * merge**2),
        **linear("linear_1", outer, hidden),
        **linear("linear_2", outer, outer),
    }
    if not values.get("multimodal_projector_bias"):
        projector = {name: size for name, size in projector.items() if not name.endswith(".bias")}
    return {f"vision_tower.{name}": shape for name, shape in tower.items()} | {
        f"multi_modal_projector.{name}": shape for name, shape in projector.items()
    }


def _mistral(architecture: str, model_type: str) -> Family:
    return Family(
        architecture=architecture,
        model_type=model_type,
        values=_VALUES,
        has_windows=True,
        nested=Nested(
            outer="Mistral3ForConditionalGeneration", model_type=model_type, tower=pixtral_tensors
        ),
    )


FAMILIES = (
    Family(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        values={
            **UNSHARED,
            # The weights of a token's experts always add up to 1.
            "norm_topk_prob": (None, True),
            # transformers reads only this field to decide on a window.
            "sliding_window": NONE,
        },
        experts=Experts(prefix="block_sparse_moe.", names=("w1", "w3", "w2"), is_normalized=True),
    ),
    _mistral("MistralForCausalLM", "mistral"),
    _mistral("Ministral3ForCausalLM", "ministral3"),
)
