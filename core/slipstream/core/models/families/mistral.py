"""Records of Mistral, Ministral 3, Mixtral, and the vision tower of Mistral 3."""

from slipstream.core.models.family import DENSE, NONE, UNSHARED, Experts, Family, Nested

# Windows are in all layers or in none.
_VALUES = {**DENSE, "layer_types": NONE, "use_sliding_window": NONE}


def _mistral(architecture: str, model_type: str) -> Family:
    return Family(
        architecture=architecture,
        model_type=model_type,
        values=_VALUES,
        has_windows=True,
        nested=Nested(
            outer="Mistral3ForConditionalGeneration", model_type=model_type, has_tower=True
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
        experts=Experts(is_normalized=True),
    ),
    _mistral("MistralForCausalLM", "mistral"),
    _mistral("Ministral3ForCausalLM", "ministral3"),
)
