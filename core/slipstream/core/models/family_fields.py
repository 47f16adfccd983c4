"""What config.json may say for one architecture alone; see `model_fields`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from slipstream.core.models.hybrid_layers import NEMOTRON_H, hybrid_problems
from slipstream.core.models.rope_fields import GEMMA, LAYER_KINDS, QWEN35, QWEN35_VISION, VISION

Values: TypeAlias = tuple[Any, ...]

OFF: Values = (None, False)
NONE: Values = (None,)
ONE: Values = (None, 1)
ZERO: Values = (None, 0)
_ANY_BIAS: Values = (None, False, True)
_DENSE: Mapping[str, Values] = {"num_experts": ZERO, "num_local_experts": ZERO}
_GELU: Values = (None, "gelu_pytorch_tanh")
_OF_GEMMA: Mapping[str, Values] = {
    **_DENSE,
    "hidden_act": _GELU,
    "hidden_activation": _GELU,
    # vLLM has no projection of its own for Gemma 2.
    "tie_word_embeddings": (None, True),
}
# The weights of a token's experts always add up to routed_scaling_factor.
_SIGMOID: Mapping[str, Values] = {
    "norm_topk_prob": (None, True),
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
}
_UNSHARED: Mapping[str, Values] = {"shared_expert_intermediate_size": ZERO}
# vLLM reads whether attention is gated, transformers always takes it so.
_GATED: Mapping[str, Values] = {"attn_output_gate": (None, True)}
# The weights of a token's experts always add up to 1.
_GATED_MIXTURE: Mapping[str, Values] = {
    **_GATED,
    "num_local_experts": ZERO,
    "norm_topk_prob": (None, True),
}
# Exceptions for one architecture. No program reads attention_bias of a Qwen2, which has biases.
ONE_VALUE_OF: Mapping[str, Mapping[str, Values]] = MappingProxyType(
    {
        "LlamaForCausalLM": _DENSE,
        "Qwen2ForCausalLM": {**_DENSE, "attention_bias": _ANY_BIAS},
        "Qwen3ForCausalLM": _DENSE,
        VISION[0]: {**_DENSE, "attention_bias": _ANY_BIAS},
        VISION[1]: _DENSE,
        # transformers lets the weights of a token's experts add up to 1, vLLM if the file says so.
        VISION[2]: {**_UNSHARED, "norm_topk_prob": (True,)},
        "Qwen3MoeForCausalLM": _UNSHARED,
        "Qwen3NextForCausalLM": {**_GATED, "num_local_experts": ZERO},
        **dict.fromkeys((QWEN35[0], QWEN35_VISION[0]), {**_DENSE, **_GATED}),
        **dict.fromkeys((QWEN35[1], QWEN35_VISION[1]), _GATED_MIXTURE),
        NEMOTRON_H: {
            **_DENSE,
            "mlp_hidden_act": (None, "relu2"),
            "use_conv_bias": (None, True),
            # vLLM has a projection of its own.
            "tie_word_embeddings": OFF,
        },
        # vLLM always has these biases.
        "Qwen2MoeForCausalLM": {"attention_bias": _ANY_BIAS, "qkv_bias": (None, True)},
        # The weights of a token's experts always add up to 1.
        "MixtralForCausalLM": {
            **_UNSHARED,
            "norm_topk_prob": (None, True),
            # transformers reads only this field to decide on a window.
            "sliding_window": NONE,
        },
        # Both have windows in all layers or in none.
        "MistralForCausalLM": {**_DENSE, "layer_types": NONE, "use_sliding_window": NONE},
        "Ministral3ForCausalLM": {**_DENSE, "layer_types": NONE, "use_sliding_window": NONE},
        "Olmo2ForCausalLM": _DENSE,
        # vLLM never lets the weights of a token's experts add up to 1.
        "Gemma2ForCausalLM": _OF_GEMMA,
        "Gemma3ForCausalLM": _OF_GEMMA,
        # vLLM reads none of these fields, but has these values.
        "GptOssForCausalLM": {
            "attention_bias": (None, True),
            "rms_norm_eps": (None, 1e-5),
            "swiglu_alpha": (None, 1.702),
            "swiglu_limit": (None, 7.0),
            "tie_word_embeddings": OFF,
            "norm_topk_prob": (None, True),
        },
        "Glm4MoeForCausalLM": {**_SIGMOID, "attention_bias": _ANY_BIAS, "use_qk_norm": _ANY_BIAS},
        "DeepseekV3ForCausalLM": {
            **_SIGMOID,
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            # transformers norms latent vectors with this one, vLLM with that of config.json.
            "rms_norm_eps": (None, 1e-6, 1e-5),
        },
        "DeepseekV2ForCausalLM": {
            # transformers does not read it.
            "norm_topk_prob": OFF,
            "topk_method": ("greedy", "group_limited_greedy"),
            "rms_norm_eps": (None, 1e-6),
        },
        "OlmoeForCausalLM": {
            **_UNSHARED,
            "norm_topk_prob": OFF,
            # vLLM reads no other, and always has a projection of its own.
            "rms_norm_eps": (None, 1e-5),
            "tie_word_embeddings": OFF,
        },
    }
)
# Architectures for which vLLM uses hidden_size / num_attention_heads as head_dim.
NO_HEAD_DIM = (VISION[0], "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "OlmoeForCausalLM")
# Architecture -> fields that are read, though other architectures may have one value only.
_OF_SIGMOID = (
    "n_routed_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    # The layers that predict further tokens are neither loaded nor sampled from.
    "num_nextn_predict_layers",
    "num_mtp_layers",
)
_LATENT = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
)
_DELTA_NETS = (
    "full_attention_interval",
    "partial_rotary_factor",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_HYBRID = (
    "hybrid_override_pattern",
    "layers_block_type",
    "layer_norm_epsilon",
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    # transformers writes these of a model without experts, too.
    "n_routed_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "moe_shared_expert_intermediate_size",
    # The layers that predict further tokens are neither loaded nor sampled from.
    "num_nextn_predict_layers",
)
# Architecture -> fields that config.json must have.
WRITTEN: Mapping[str, tuple[str, ...]] = {
    "DeepseekV3ForCausalLM": ("scoring_func", "topk_method"),
    VISION[2]: ("norm_topk_prob",),
}
READ: Mapping[str, tuple[str, ...]] = {
    "Glm4MoeForCausalLM": (*_OF_SIGMOID, "partial_rotary_factor"),
    "DeepseekV2ForCausalLM": (*_OF_SIGMOID, *_LATENT),
    "DeepseekV3ForCausalLM": (*_OF_SIGMOID, *_LATENT),
    NEMOTRON_H: _HYBRID,
    "Qwen3NextForCausalLM": _DELTA_NETS,
    # The layers that predict further tokens are neither loaded nor sampled from.
    **dict.fromkeys((*QWEN35, *QWEN35_VISION), (*_DELTA_NETS, "mtp_num_hidden_layers")),
    "Gemma2ForCausalLM": ("attn_logit_softcapping", "final_logit_softcapping"),
}
# Architectures whose embeddings are tied if config.json does not say so.
TIED = GEMMA


def family_problems(values: Mapping[str, Any], architecture: str) -> Iterator[str]:
    """Yields one line for each rule that an architecture has between fields."""
    if architecture == "DeepseekV2ForCausalLM":
        yield from _group_problems(values)
    if architecture == "GptOssForCausalLM":
        yield from _window_problems(values)
    if architecture == NEMOTRON_H:
        yield from hybrid_problems(values)


def _group_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Checks the groups of experts of a DeepSeek V2: vLLM reads no topk_method."""
    groups, chosen = values.get("n_group"), values.get("topk_group")
    if not (isinstance(groups, int) and isinstance(chosen, int) and 1 <= chosen <= groups):
        yield (
            "model.path: n_group and topk_group of a DeepseekV2ForCausalLM must be numbers, as "
            f"rollout servers need them, got {groups!r} and {chosen!r}"
        )
    elif groups > 1 and values.get("topk_method", "greedy") == "greedy":
        yield (
            "model.path: n_group of a DeepseekV2ForCausalLM with topk_method greedy must be 1, "
            f"since rollout servers would choose groups, got {groups}"
        )


def _window_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Checks the layers of a gpt-oss: vLLM reads no layer_types."""
    kinds = values.get("layer_types") or ()
    wrong = [place for place, kind in enumerate(kinds) if kind != LAYER_KINDS[1 - place % 2]]
    if wrong:
        yield (
            "model.path: layer_types of a GptOssForCausalLM must alternate from sliding_attention "
            f"on, as rollout servers take it, got {kinds[wrong[0]]!r} for layer {wrong[0]}"
        )
