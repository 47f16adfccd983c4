"""GLM 4.5 and its successors with experts."""

from slipstream.core.models.families.deepseek import READ_OF_EXPERTS, SIGMOID
from slipstream.core.models.family import ANY_BIAS, Experts, Family, Rope

FAMILIES = (
    Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        values={**SIGMOID, "attention_bias": ANY_BIAS, "use_qk_norm": ANY_BIAS},
        read=(*READ_OF_EXPERTS, "partial_rotary_factor"),
        rope=Rope(is_partial=True),
        experts=Experts(),
    ),
)
