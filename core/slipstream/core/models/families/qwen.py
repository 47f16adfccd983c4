"""Records of Qwen 2 to 3.5, dense and with experts, for text and with a tower, and of MiMo 7B."""

from collections.abc import Iterator
from dataclasses import replace

from slipstream.core.models.family import (
    ANY_BIAS,
    DENSE,
    FULL,
    LINEAR,
    UNSHARED,
    ZERO,
    EngineFacts,
    Experts,
    Family,
    Rope,
    Table,
    VisionFacts,
)


def _axes_problems(_: str, table: Table, values: Table) -> Iterator[str]:
    """Yields one line for each M-RoPE setting that a model of the family cannot have."""
    sections = table.get("mrope_section")
    if not sections:
        return
    architecture = values["architectures"][0]
    if table.get("mrope_interleaved") is not True:
        yield (
            f"model.path: mrope_interleaved of a {architecture} must be true in rope_parameters, "
            f"as transformers takes it, got {table.get('mrope_interleaved')!r}"
        )
    # transformers takes a quarter if config.json does not say which part is turned.
    part = table.get("partial_rotary_factor", values.get("partial_rotary_factor", 0.25))
    turned = int(values.get("head_dim", 256) * part) // 2
    if len(sections) != 3 or sum(sections) != turned:
        yield (
            f"model.path: mrope_section of a {architecture} must be three numbers that add up to "
            f"half of the turned part of a head, {turned}, got {sections}"
        )


_DEEP_LAYERS = (8, 16, 24)
_IMAGE_TOKEN = 151655
_READ_OF_DELTA_NETS = (
    *("full_attention_interval", "partial_rotary_factor", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
_NO_ADAPTERS = (
    "of layers without attention only the delta nets of a Qwen3NextForCausalLM have adapters"
)
# vLLM reads whether attention is gated; transformers always gates it.
_GATED = {"attn_output_gate": (None, True)}
_GATED_MIXTURE = {
    **_GATED,
    "num_local_experts": ZERO,
    # The weights of a token's experts always add up to 1.
    "norm_topk_prob": (None, True),
}
_AXES = ("mrope_section", "mrope_interleaved")
_SEEING_ROPE = Rope(kinds=("default",), alias="mrope", needed=_AXES[:1], optional=_AXES[1:])
_QWEN35 = Family(
    values={**DENSE, **_GATED},
    # The layers that predict further tokens are neither loaded nor sampled from.
    read=(*_READ_OF_DELTA_NETS, "mtp_num_hidden_layers"),
    layer_kinds=(FULL, LINEAR),
    # Text has one axis of positions, so vLLM ignores these keys.
    rope=Rope(is_partial=True, optional=_AXES),
    query_norm="head",
    is_delta=True,
    engine=EngineFacts(module="delta_models", starts_cuda=True),
    cannot={"lora.rank": _NO_ADAPTERS},
)
_QWEN35_EXPERTS = Experts(is_normalized=True)
_SEEING_QWEN35 = replace(
    _QWEN35,
    rope=replace(_SEEING_ROPE, is_partial=True, problems=_axes_problems),
    vision=VisionFacts(image_token=248056, ties="same"),
)

FAMILIES = (
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        # No program reads attention_bias of a Qwen2, which has biases.
        values={**DENSE, "attention_bias": ANY_BIAS},
        has_head_dim=False,
        has_engine_bits=True,
    ),
    Family(
        architecture="MiMoForCausalLM",
        model_type="mimo",
        values={**DENSE, "attention_bias": ANY_BIAS},
        # The layers that predict further tokens are neither loaded nor sampled from.
        read=("num_nextn_predict_layers",),
        has_head_dim=False,
    ),
    Family(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        # vLLM always has these biases.
        values={"attention_bias": ANY_BIAS, "qkv_bias": (None, True)},
        has_head_dim=False,
        experts=Experts(needs_shared=True),
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        values=DENSE,
        query_norm="head",
        has_engine_bits=True,
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        values=UNSHARED,
        query_norm="head",
        experts=Experts(),
    ),
    Family(
        architecture="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        values={**_GATED, "num_local_experts": ZERO},
        read=_READ_OF_DELTA_NETS,
        layer_kinds=(FULL, LINEAR),
        rope=Rope(is_partial=True),
        query_norm="head",
        is_delta=True,
        experts=Experts(),
    ),
    replace(_QWEN35, architecture="Qwen3_5ForCausalLM", model_type="qwen3_5_text"),
    replace(
        _QWEN35,
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        values=_GATED_MIXTURE,
        experts=_QWEN35_EXPERTS,
    ),
    Family(
        architecture="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        values={**DENSE, "attention_bias": ANY_BIAS},
        has_head_dim=False,
        rope=_SEEING_ROPE,
        vision=VisionFacts(image_token=_IMAGE_TOKEN, ties="either"),
        engine=EngineFacts(module="vision_models"),
    ),
    Family(
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl",
        values=DENSE,
        rope=_SEEING_ROPE,
        query_norm="head",
        vision=VisionFacts(image_token=_IMAGE_TOKEN, deep_layers=_DEEP_LAYERS),
        engine=EngineFacts(module="vision_models"),
    ),
    Family(
        architecture="Qwen3VLMoeForConditionalGeneration",
        model_type="qwen3_vl_moe",
        # transformers always normalizes the weights of a token's experts, vLLM if the file says so.
        values={**UNSHARED, "norm_topk_prob": (True,)},
        written=("norm_topk_prob",),
        rope=_SEEING_ROPE,
        query_norm="head",
        experts=Experts(is_fused=True),
        vision=VisionFacts(image_token=_IMAGE_TOKEN, deep_layers=_DEEP_LAYERS),
        engine=EngineFacts(module="vision_models"),
    ),
    replace(_SEEING_QWEN35, architecture="Qwen3_5ForConditionalGeneration", model_type="qwen3_5"),
    replace(
        _SEEING_QWEN35,
        architecture="Qwen3_5MoeForConditionalGeneration",
        model_type="qwen3_5_moe",
        values=_GATED_MIXTURE,
        experts=replace(_QWEN35_EXPERTS, is_fused=True),
    ),
)
