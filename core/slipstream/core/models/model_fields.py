"""Rules on the fields of config.json: which ones are used, and which may have one value only.

Three programs read the file: transformers, Megatron-Bridge for the trainer and vLLM for the rollout
servers. If one of them reads a field that another ignores, they compute different models.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from slipstream.core.models.family import FULL, NONE, OFF, ONE, SLIDING, ZERO, Family, Values
from slipstream.core.models.registry import architecture_of, family_of

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
        # The vision tower is transformers' own class in the learner.
        "vision_config",
        "quantization_config",
    }
)
# Fields that do not change the function: names, token ids, how a model was made or is stored.
# Dropout and jitter belong to training; neither the trainer nor a rollout server applies them.
HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_model_name_or_path",
        "_name_or_path",
        "add_cross_attention",
        "attention_dropout",
        "attention_head_dim",
        "aux_loss_alpha",
        "bad_words_ids",
        "begin_suppress_tokens",
        "cache_implementation",
        "boi_token_index",
        "bos_token_id",
        # Tokens that a Mamba layer multiplies as one matrix.
        "chunk_size",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "do_sample",
        "dtype",
        "embd_pdrop",
        "ep_size",
        "eoi_token_index",
        "eos_token_id",
        "expand",
        # gpt-oss has these values under two names.
        "experts_per_token",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "head_dtype",
        "hidden_dropout",
        "id2label",
        "image_token_id",
        "image_token_index",
        "initial_context_length",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        # Servers keep the states of delta nets in float32 if the run does not say otherwise.
        "mamba_ssm_dtype",
        "label2id",
        "mamba_ssm_cache_dtype",
        "max_length",
        "moe_shared_expert_overlap",
        "mtp_hybrid_override_pattern",
        "mtp_layers_block_type",
        "num_logits_to_keep",
        "mtp_use_dedicated_embeddings",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "repetition_penalty",
        "rescale_prenorm_residual",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "seq_aux",
        "task_specific_params",
        "temperature",
        # How a fresh model is made. transformers also takes no smaller steps than the least one;
        # learner and rollout servers take any.
        "time_step_floor",
        "time_step_limit",
        "time_step_max",
        "time_step_min",
        "time_step_rank",
        "tokenizer_class",
        "torch_dtype",
        "top_k",
        "top_p",
        "torchscript",
        # These are read where images are.
        "mm_tokens_per_image",
        "multimodal_projector_bias",
        "spatial_merge_size",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "use_mamba_kernels",
        "video_token_id",
        "vision_end_token_id",
        "vision_start_token_id",
        "vision_token_id",
    }
)
# Field -> values with which all three programs compute the same, for every architecture.
ONE_VALUE: Mapping[str, Values] = MappingProxyType(
    {
        "hidden_act": ("silu",),
        "hidden_activation": (None, "silu"),
        "attention_bias": OFF,
        "attn_output_gate": OFF,
        "bias": OFF,
        "qkv_bias": OFF,
        "mlp_bias": OFF,
        "qk_norm": OFF,
        "use_qk_norm": OFF,
        "is_causal": (None, True),
        "use_bidirectional_attention": OFF,
        "logit_scale": ONE,
        "partial_rotary_factor": ONE,
        "rotary_pct": ONE,
        "rotary_emb_fraction": ONE,
        "rotary_emb_base": NONE,
        "rope_interleaved": OFF,
        "use_mrope": OFF,
        "original_max_position_embeddings": NONE,
        "mrope_section": NONE,
        "xdrope_section": NONE,
        "dual_chunk_attention_config": NONE,
        "clip_qkv": NONE,
        "final_logit_softcapping": NONE,
        "attn_logit_softcapping": NONE,
        "scoring_func": (None, "softmax"),
        "n_routed_experts": ZERO,
        "n_group": ONE,
        "topk_group": ONE,
        "routed_scaling_factor": ONE,
        "q_lora_rank": NONE,
        "kv_lora_rank": NONE,
        "qk_nope_head_dim": NONE,
        "qk_rope_head_dim": NONE,
        "v_head_dim": NONE,
        "num_nextn_predict_layers": ZERO,
        "num_mtp_layers": ZERO,
        "mtp_num_hidden_layers": ZERO,
        "layer_scale": OFF,
        "rope_interleave": (None, True),
        "topk_method": NONE,
        "moe_layer_freq": ONE,
        "qk_head_dim": NONE,
        "swiglu_alpha": NONE,
        "swiglu_limit": NONE,
        "linear_conv_kernel_dim": NONE,
        "linear_key_head_dim": NONE,
        "linear_value_head_dim": NONE,
        "linear_num_key_heads": NONE,
        "linear_num_value_heads": NONE,
        "full_attention_interval": NONE,
        "hybrid_override_pattern": NONE,
        "layers_block_type": NONE,
        "layer_norm_epsilon": NONE,
        "mamba_num_heads": NONE,
        "mamba_head_dim": NONE,
        "n_groups": NONE,
        "ssm_state_size": NONE,
        "conv_kernel": NONE,
        "mamba_hidden_act": (None, "silu"),
        "mlp_hidden_act": NONE,
        "use_conv_bias": NONE,
        "use_bias": OFF,
        "mamba_proj_bias": OFF,
        "residual_in_fp32": OFF,
        "moe_latent_size": NONE,
        "moe_shared_expert_intermediate_size": NONE,
        # Older names, which transformers puts above the newer ones.
        "mamba_n_groups": NONE,
        "mamba_d_conv": NONE,
        "mamba_conv_bias": NONE,
        "vision_feature_layer": (None, -1),
        "projector_hidden_act": (None, "gelu"),
    }
)


def field_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each field with which transformers, learner and servers would differ.

    They would compute different models, for example because one of them ignores the field.
    """
    architecture, family = architecture_of(values), family_of(values)
    allowed = {**ONE_VALUE, **family.values}
    for name in family.read:
        del allowed[name]
    for name, value in values.items():
        if name in allowed and value not in allowed[name]:
            yield (
                f"model.path: {name} of a {architecture} must be {_written(allowed[name])}, "
                f"got {value!r}: transformers, learner and rollout servers would compute "
                "different models"
            )
    for name in family.written:
        if name not in values:
            yield (
                f"model.path: {name} of a {architecture} must be {_written(allowed[name])}, "
                "got none: rollout servers take another value if config.json has none"
            )
    for kind in sorted(set(values.get("layer_types") or ()) - set(family.layer_kinds)):
        kinds = " or ".join(family.layer_kinds)
        yield f"model.path: layer_types must all be {kinds}, got {kind!r}"
    yield from family.problems(values)
    counts = {values[name] for name in ("num_experts", "num_local_experts") if values.get(name)}
    if len(counts) > 1:
        yield (
            f"model.path: num_experts and num_local_experts must be the same number, "
            f"got {values['num_experts']} and {values['num_local_experts']}"
        )
    yield from _head_problems(values, family)
    yield from rope_problems(values)


def unknown_fields(values: Mapping[str, Any]) -> list[str]:
    """Returns the fields of a config.json whose effect on the model is not known."""
    known = HONOURED | HARMLESS | ONE_VALUE.keys()
    return sorted(name for name in values if name not in known)


def has_tied_output(values: Mapping[str, Any]) -> bool:
    """Whether the output projection shares the embedding's weights, according to config.json."""
    return bool(values.get("tie_word_embeddings", family_of(values).is_tied))


def _head_problems(values: Mapping[str, Any], family: Family) -> Iterator[str]:
    size, heads = values.get("hidden_size"), values.get("num_attention_heads")
    head_dim = values.get("head_dim")
    if family.has_head_dim or not (size and heads and head_dim):
        return
    if head_dim * heads != size:
        yield (
            f"model.path: head_dim of a {family.architecture} must be hidden_size / "
            f"num_attention_heads = {size / heads:g}, as rollout servers take it, got {head_dim}"
        )


def _written(allowed: Values) -> str:
    names = [str(value).lower() if isinstance(value, bool) else repr(value) for value in allowed]
    return " or ".join("left out" if name == "None" else name for name in names)


_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Kind of rotary embedding -> further keys that it needs: the programs' defaults differ.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": _LLAMA3_KEYS,
    "yarn": ("factor", "original_max_position_embeddings"),
}
# Kind of rotary embedding -> further keys that it may have.
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": (
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
        # Ministral 3 writes these; `ModelSizes` keeps sequences within what they do not change.
        "llama_4_scaling_beta",
        "max_position_embeddings",
    )
}


def rope_table(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the RoPE table: `rope_scaling`, else `rope_parameters`, as in transformers."""
    table = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return table if isinstance(table, Mapping) else {}


def rope_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each RoPE setting with which learner, servers and transformers differ."""
    new, old = values.get("rope_parameters"), values.get("rope_scaling")
    if new and old and new != old:
        yield "model.path: config.json has both rope_parameters and rope_scaling, which differ"
    table = rope_table(values)
    if family_of(values).rope.is_by_layer and set(table) & {FULL, SLIDING}:
        for kind in sorted(table):
            yield from _table_problems(table[kind], values)
        return
    yield from _table_problems(table, values)
    theta, other = table.get("rope_theta"), values.get("rope_theta")
    if theta is not None and other is not None and theta != other:
        yield (
            f"model.path: rope_theta is {other} in config.json and {theta} in its rope_parameters"
        )


def _table_problems(table: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Yields one line for each fault of one table of a rotary embedding."""
    rope, architecture = family_of(values).rope, architecture_of(values)
    kind = table.get("rope_type", table.get("type", "default"))
    kind = "default" if kind == rope.alias else kind
    needed, optional = _NEEDED.get(kind, ()), rope.options.get(kind, _OPTIONAL.get(kind, ()))
    if not rope.kinds or kind in rope.kinds:
        needed, optional = (*needed, *rope.needed), (*optional, *rope.optional)
    else:
        yield (
            f"model.path: the rope_type of a {architecture} must be one of "
            f"{', '.join(rope.kinds)}, got {kind!r}"
        )
    for name in sorted(set(table) - {*_ROPE_KEYS, *needed, *optional}):
        yield (
            f"model.path: {name} in rope_parameters is not computed with for the rope_type "
            f"{kind!r}, got {table[name]!r}"
        )
    for name in (name for name in needed if table.get(name) is None):
        yield f"model.path: the rope_type {kind!r} needs {name} in rope_parameters"
    yield from _yarn_problems(kind, table, values)
    if rope.problems is not None:
        yield from rope.problems(kind, table, values)
    if rope.is_partial and kind != "default":
        yield f"model.path: rope_type of a {architecture} must be default, got {kind!r}"
    if not rope.is_partial and table.get("partial_rotary_factor") not in (None, 1):
        yield (
            f"model.path: partial_rotary_factor must be 1, got {table['partial_rotary_factor']!r}: "
            "transformers, learner and rollout servers would compute different models"
        )


def _yarn_problems(kind: str, table: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    factor, original = table.get("factor"), table.get("original_max_position_embeddings")
    longest = values.get("max_position_embeddings")
    if kind != "yarn" or not (factor and original and longest):
        return
    if longest > factor * original:
        yield (
            f"model.path: max_position_embeddings must be at most factor * "
            f"original_max_position_embeddings = {factor * original:g}, for which rollout servers "
            f"compute positions, got {longest}"
        )
