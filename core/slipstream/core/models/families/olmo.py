"""Records of OLMo 2, OLMoE and FlexOlmo."""

from slipstream.core.models.family import DENSE, OFF, UNSHARED, Experts, Family

FAMILIES = (
    Family(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        values=DENSE,
        query_norm="whole",
    ),
    Family(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        values={
            **UNSHARED,
            # vLLM never normalizes the weights of a token's experts to a sum of 1.
            "norm_topk_prob": OFF,
            # vLLM uses 1e-5 for all, and always has a separate output projection.
            "rms_norm_eps": (None, 1e-5),
            "tie_word_embeddings": OFF,
        },
        has_head_dim=False,
        query_norm="whole",
        experts=Experts(),
    ),
    Family(
        architecture="FlexOlmoForCausalLM",
        model_type="flex_olmo",
        values=UNSHARED,
        has_head_dim=False,
        query_norm="whole",
        experts=Experts(),
    ),
)
