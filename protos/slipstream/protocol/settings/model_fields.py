"""Fields of a model's config.json: which are used, and which may have one value only.

Three programs read the file: transformers, Megatron-Bridge for the trainer and vLLM for the rollout
servers. If one of them reads a field that another ignores, they compute different models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from slipstream.protocol.settings.rope_fields import (
    ALTERNATING,
    GEMMA,
    LAYER_KINDS,
    architecture_of,
    rope_problems,
)

Values: TypeAlias = tuple[Any, ...]

# Fields that all three programs use; `model_problems` checks their values.
HONOURED = frozenset(
    {
        "architectures",
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "norm_topk_prob",
        # These are refused if they describe more than one kind of layer.
        "decoder_sparse_step",
        "mlp_only_layers",
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
        "first_k_dense_replace",
        "n_shared_experts",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
        "quantization_config",
    }
)
# Fields that do not change the function: names, token ids, how a model was made or is stored.
# Dropout and jitter belong to training; neither the trainer nor a rollout server applies them.
HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "add_cross_attention",
        "attention_dropout",
        "aux_loss_alpha",
        "bad_words_ids",
        "begin_suppress_tokens",
        "cache_implementation",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "do_sample",
        "dtype",
        "embd_pdrop",
        "ep_size",
        "eos_token_id",
        # gpt-oss says these twice.
        "experts_per_token",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "head_dtype",
        "hidden_dropout",
        "id2label",
        "initial_context_length",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "max_length",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "seq_aux",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "torch_dtype",
        "top_k",
        "top_p",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
_OFF: Values = (None, False)
_NONE: Values = (None,)
_ONE: Values = (None, 1)
_ZERO: Values = (None, 0)
# Field -> values with which all three programs compute the same, for every architecture.
ONE_VALUE: Mapping[str, Values] = MappingProxyType(
    {
        "hidden_act": ("silu",),
        "hidden_activation": (None, "silu"),
        "attention_bias": _OFF,
        "bias": _OFF,
        "qkv_bias": _OFF,
        "mlp_bias": _OFF,
        "qk_norm": _OFF,
        "use_qk_norm": _OFF,
        "is_causal": (None, True),
        "use_bidirectional_attention": _OFF,
        "logit_scale": _ONE,
        "partial_rotary_factor": _ONE,
        "rotary_pct": _ONE,
        "rotary_emb_fraction": _ONE,
        "rotary_emb_base": _NONE,
        "rope_interleaved": _OFF,
        "use_mrope": _OFF,
        "original_max_position_embeddings": _NONE,
        "mrope_section": _NONE,
        "xdrope_section": _NONE,
        "dual_chunk_attention_config": _NONE,
        "clip_qkv": _NONE,
        "final_logit_softcapping": _NONE,
        "attn_logit_softcapping": _NONE,
        "scoring_func": (None, "softmax"),
        "n_routed_experts": _ZERO,
        "n_group": _ONE,
        "topk_group": _ONE,
        "routed_scaling_factor": _ONE,
        "q_lora_rank": _NONE,
        "kv_lora_rank": _NONE,
        "qk_nope_head_dim": _NONE,
        "qk_rope_head_dim": _NONE,
        "v_head_dim": _NONE,
        "num_nextn_predict_layers": _ZERO,
        "num_mtp_layers": _ZERO,
        "rope_interleave": (None, True),
        "topk_method": _NONE,
        "moe_layer_freq": _ONE,
        "qk_head_dim": _NONE,
        "swiglu_alpha": _NONE,
        "swiglu_limit": _NONE,
        "linear_conv_kernel_dim": _NONE,
        "linear_key_head_dim": _NONE,
        "linear_value_head_dim": _NONE,
        "linear_num_key_heads": _NONE,
        "linear_num_value_heads": _NONE,
        "full_attention_interval": _NONE,
    }
)
_ANY_BIAS: Values = (None, False, True)
_DENSE: Mapping[str, Values] = {"num_experts": _ZERO, "num_local_experts": _ZERO}
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
_UNSHARED: Mapping[str, Values] = {"shared_expert_intermediate_size": _ZERO}
# Exceptions for one architecture. No program reads attention_bias of a Qwen2, which has biases.
ONE_VALUE_OF: Mapping[str, Mapping[str, Values]] = MappingProxyType(
    {
        "LlamaForCausalLM": _DENSE,
        "Qwen2ForCausalLM": {**_DENSE, "attention_bias": _ANY_BIAS},
        "Qwen3ForCausalLM": _DENSE,
        "Qwen3MoeForCausalLM": _UNSHARED,
        # vLLM always has these biases.
        "Qwen2MoeForCausalLM": {"attention_bias": _ANY_BIAS, "qkv_bias": (None, True)},
        # The weights of a token's experts always add up to 1.
        "MixtralForCausalLM": {
            **_UNSHARED,
            "norm_topk_prob": (None, True),
            # transformers reads only this field to decide on a window.
            "sliding_window": _NONE,
        },
        # Both have windows in all layers or in none.
        "MistralForCausalLM": {**_DENSE, "layer_types": _NONE, "use_sliding_window": _NONE},
        "Ministral3ForCausalLM": {**_DENSE, "layer_types": _NONE, "use_sliding_window": _NONE},
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
            "tie_word_embeddings": _OFF,
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
            "norm_topk_prob": _OFF,
            "topk_method": ("greedy", "group_limited_greedy"),
            "rms_norm_eps": (None, 1e-6),
        },
        "OlmoeForCausalLM": {
            **_UNSHARED,
            "norm_topk_prob": _OFF,
            # vLLM reads no other, and always has a projection of its own.
            "rms_norm_eps": (None, 1e-5),
            "tie_word_embeddings": _OFF,
        },
    }
)
# Architectures for which vLLM uses hidden_size / num_attention_heads as head_dim.
_NO_HEAD_DIM = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "OlmoeForCausalLM")
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
_LINEAR = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
# Architecture -> fields that config.json must have.
_WRITTEN: Mapping[str, tuple[str, ...]] = {"DeepseekV3ForCausalLM": ("scoring_func", "topk_method")}
_READ: Mapping[str, tuple[str, ...]] = {
    "Glm4MoeForCausalLM": (*_OF_SIGMOID, "partial_rotary_factor"),
    "DeepseekV2ForCausalLM": (*_OF_SIGMOID, *_LATENT),
    "DeepseekV3ForCausalLM": (*_OF_SIGMOID, *_LATENT),
    "Qwen3NextForCausalLM": (*_LINEAR, "full_attention_interval", "partial_rotary_factor"),
    "Gemma2ForCausalLM": ("attn_logit_softcapping", "final_logit_softcapping"),
}
# Architectures whose embeddings are tied if config.json does not say so.
_TIED = GEMMA


def field_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields one line for each field for which the three programs would compute differently."""
    architecture = architecture_of(values)
    allowed = {**ONE_VALUE, **ONE_VALUE_OF.get(architecture, {})}
    for name in _READ.get(architecture, ()):
        del allowed[name]
    for name, value in values.items():
        if name in allowed and value not in allowed[name]:
            yield (
                f"model.path: {name} of a {architecture} must be {_written(allowed[name])}, "
                f"got {value!r}: transformers, learner and rollout servers would compute "
                "different models"
            )
    for name in _WRITTEN.get(architecture, ()):
        if name not in values:
            yield (
                f"model.path: {name} of a {architecture} must be {_written(allowed[name])}, "
                "got none: rollout servers take another value if config.json has none"
            )
    kinds = LAYER_KINDS if architecture in ALTERNATING else LAYER_KINDS[:1]
    if architecture == "Qwen3NextForCausalLM":
        kinds = (*kinds, "linear_attention")
    for kind in sorted(set(values.get("layer_types") or ()) - set(kinds)):
        yield f"model.path: layer_types must all be {' or '.join(kinds)}, got {kind!r}"
    if architecture == "DeepseekV2ForCausalLM":
        yield from _group_problems(values)
    if architecture == "GptOssForCausalLM":
        yield from _window_problems(values)
    counts = {values[name] for name in ("num_experts", "num_local_experts") if values.get(name)}
    if len(counts) > 1:
        yield (
            f"model.path: num_experts and num_local_experts must be the same number, "
            f"got {values['num_experts']} and {values['num_local_experts']}"
        )
    yield from _head_problems(values, architecture)
    yield from rope_problems(values)


def unknown_fields(values: Mapping[str, Any]) -> list[str]:
    """Returns the fields of a config.json whose effect on the model is not known."""
    known = HONOURED | HARMLESS | ONE_VALUE.keys()
    return sorted(name for name in values if name not in known)


def has_tied_output(values: Mapping[str, Any]) -> bool:
    """Whether the projection to the vocabulary is the embedding, by the table of a config.json."""
    return bool(values.get("tie_word_embeddings", architecture_of(values) in _TIED))


def _window_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Checks the layers of a gpt-oss: vLLM reads no layer_types."""
    kinds = values.get("layer_types") or ()
    wrong = [place for place, kind in enumerate(kinds) if kind != LAYER_KINDS[1 - place % 2]]
    if wrong:
        yield (
            "model.path: layer_types of a GptOssForCausalLM must alternate from sliding_attention "
            f"on, as rollout servers take it, got {kinds[wrong[0]]!r} for layer {wrong[0]}"
        )


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


def _head_problems(values: Mapping[str, Any], architecture: str) -> Iterator[str]:
    size, heads = values.get("hidden_size"), values.get("num_attention_heads")
    head_dim = values.get("head_dim")
    if architecture not in _NO_HEAD_DIM or not (size and heads and head_dim):
        return
    if head_dim * heads != size:
        yield (
            f"model.path: head_dim of a {architecture} must be hidden_size / num_attention_heads "
            f"= {size / heads:g}, as rollout servers take it, got {head_dim}"
        )


def _written(allowed: Values) -> str:
    names = [str(value).lower() if isinstance(value, bool) else repr(value) for value in allowed]
    return " or ".join("left out" if name == "None" else name for name in names)
