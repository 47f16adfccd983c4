"""The record of Gemma 3."""

from slipstream.core.models.family import DENSE, FULL, SLIDING, Family, Nested, Rope, Values

_GELU: Values = (None, "gelu_pytorch_tanh")

FAMILIES = (
    Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        values={
            **DENSE,
            "hidden_act": _GELU,
            "hidden_activation": _GELU,
            "tie_word_embeddings": (None, True),
        },
        layer_kinds=(FULL, SLIDING),
        is_tied=True,
        rope=Rope(kinds=("default", "linear"), is_by_layer=True),
        query_norm="head",
        has_windows=True,
        nested=Nested(
            outer="Gemma3ForConditionalGeneration",
            model_type="gemma3_text",
            defaults={
                "vocab_size": 262208,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "tie_word_embeddings": True,
            },
        ),
        cannot={
            "model.dtype": "vLLM (0.32.0) does not compute it in float16",
            "sampling.max_images": (
                "its tokens of an image attend to each other in both directions, the learner's "
                "only to those before them"
            ),
        },
    ),
)
