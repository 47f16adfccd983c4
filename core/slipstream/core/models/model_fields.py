"""Rules on the fields of config.json: which ones are used, and which may have one value only.

Three programs read the file: transformers, Megatron-Bridge for the trainer and vLLM for the rollout
servers. If one of them reads a field that another ignores, they compute different models.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from slipstream.core.models import families

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
        "norm_topk_prob",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        # The next fields are refused if they describe more than one kind of layer.
        "decoder_sparse_step",
        "mlp_only_layers",
        "first_k_dense_replace",
        "n_shared_experts",
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
        # The vision tower is transformers' own class in the learner.
        "vision_config",
        "quantization_config",
    }
)
# Fields that do not change the function.
HARMLESS = frozenset(
    {
        # Names, and how the files were made.
        "_attn_implementation_autoset",
        "_model_name_or_path",
        "_name_or_path",
        "prefix",
        "finetuning_task",
        "task_specific_params",
        "problem_type",
        "id2label",
        "label2id",
        "tokenizer_class",
        "is_llama_config",
        "transformers_version",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "pretraining_tp",
        "ep_size",
        # How a model is stored and run. Servers keep the states of delta nets in float32 if the run
        # does not say otherwise.
        "dtype",
        "torch_dtype",
        "head_dtype",
        "mamba_ssm_dtype",
        "mamba_ssm_cache_dtype",
        "torchscript",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "num_logits_to_keep",
        "use_cache",
        "cache_implementation",
        "moe_shared_expert_overlap",
        "chunk_size_feed_forward",
        # Values that other fields have too, as in gpt-oss, or that other models use.
        "attn_type_list",
        "mlp_intermediate_size",
        "shared_moe_mode",
        "experts_per_token",
        "initial_context_length",
        "attention_head_dim",
        "is_decoder",
        "is_encoder_decoder",
        "add_cross_attention",
        "cross_attention_hidden_size",
        "mtp_use_dedicated_embeddings",
        # Token ids, and settings of sampling.
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "bad_words_ids",
        "begin_suppress_tokens",
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
        "image_token_id",
        "video_token_id",
        "vision_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "max_length",
        "repetition_penalty",
        # Dropout, jitter and losses of training; neither trainer nor rollout servers apply them.
        "attention_dropout",
        "classifier_dropout",
        "embd_pdrop",
        "hidden_dropout",
        "resid_pdrop",
        "residual_dropout",
        "router_jitter_noise",
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
        # How a fresh model is made.
        "initializer_range",
        # The next fields are read where images are.
        "mm_tokens_per_image",
        "multimodal_projector_bias",
        "spatial_merge_size",
        "projector_hidden_act",
        "vision_feature_layer",
        "projection_hidden_size",
        "projection_layer_norm_eps",
        "media_placeholder_token_id",
        "video_placeholder",
        "use_unified_vision_chunk",
        "ignore_index",
    }
)
# Fields that must be left out: only some families compute with them.
_LEFT_OUT = (
    # Positions and attention.
    "rotary_emb_base",
    "original_max_position_embeddings",
    "mrope_section",
    "xdrope_section",
    "dual_chunk_attention_config",
    "clip_qkv",
    "rotary_dim",
    "qk_norm_type",
    "no_rope_layers",
    "no_rope_layer_interval",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    # Latent attention.
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    # Experts.
    "topk_method",
    "swiglu_alpha",
    "swiglu_limit",
    "mlp_layer_types",
    "use_routing_bias",
    # Delta nets.
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "full_attention_interval",
)
# Fields that must be false, 1 or 0 if config.json has them.
_FALSE = (
    "attention_bias",
    "attention_out_bias",
    "bias",
    "qkv_bias",
    "mlp_bias",
    "use_bias",
    "attn_output_gate",
    "qk_norm",
    "use_qk_norm",
    "use_bidirectional_attention",
    "rope_interleaved",
    "use_mrope",
    "layer_scale",
)
_IS_ONE = (
    "logit_scale",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_emb_fraction",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "moe_layer_freq",
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_beta",
)
_IS_ZERO = (
    "n_routed_experts",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "use_mtp",
    "mtp_transformer_layers",
    "shared_intermediate_size",
)
# Field -> values with which all three programs compute the same, for every architecture.
ONE_VALUE: Mapping[str, families.Values] = MappingProxyType(
    {
        **dict.fromkeys(_LEFT_OUT, families.NONE),
        **dict.fromkeys(_FALSE, families.OFF),
        **dict.fromkeys(_IS_ONE, families.ONE),
        **dict.fromkeys(_IS_ZERO, families.ZERO),
        "hidden_act": ("silu",),
        "hidden_activation": (None, "silu"),
        "is_causal": (None, True),
        "rope_interleave": (None, True),
        "scoring_func": (None, "softmax"),
    }
)
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


def field_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each field with which learner or servers would compute otherwise."""
    architecture = families.architecture_of(values)
    family = families.family_of(values)
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
    size, heads, head_dim = (
        values.get(name) or 0 for name in ("hidden_size", "num_attention_heads", "head_dim")
    )
    is_checked = not family.has_head_dim and size and heads and head_dim
    if is_checked and head_dim * heads != size:
        yield (
            f"model.path: head_dim of a {architecture} must be hidden_size / "
            f"num_attention_heads = {size / heads:g}, as rollout servers take it, got {head_dim}"
        )
    yield from rope_problems(values)


def unknown_fields(values: Mapping[str, Any]) -> list[str]:
    """Returns the fields of a config.json whose effect on the model is not known."""
    known_fields = HONOURED | HARMLESS | ONE_VALUE.keys()
    return sorted(name for name in values if name not in known_fields)


def has_tied_output(values: Mapping[str, Any]) -> bool:
    """Whether the output projection shares the embedding's weights, according to config.json."""
    return bool(values.get("tie_word_embeddings", families.family_of(values).is_tied))


def _written(allowed: families.Values) -> str:
    names = [str(value).lower() if isinstance(value, bool) else repr(value) for value in allowed]
    return " or ".join("left out" if name == "None" else name for name in names)


def rope_table(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the RoPE table: `rope_scaling`, else `rope_parameters`, as in transformers."""
    table = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return table if isinstance(table, Mapping) else {}


def rope_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each RoPE setting with which learner, servers and transformers differ."""
    new = values.get("rope_parameters")
    old = values.get("rope_scaling")
    if new and old and new != old:
        yield "model.path: config.json has both rope_parameters and rope_scaling, which differ"
    table = rope_table(values)
    kinds = {families.FULL, families.SLIDING}
    if families.family_of(values).rope.is_by_layer and set(table) & kinds:
        for kind in sorted(table):
            yield from _table_problems(table[kind], values)
        return
    yield from _table_problems(table, values)
    theta = table.get("rope_theta")
    other = values.get("rope_theta")
    if theta is not None and other is not None and theta != other:
        yield (
            f"model.path: rope_theta is {other} in config.json and {theta} in its rope_parameters"
        )


def _table_problems(table: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Yields one line for each fault of one table of a rotary embedding."""
    rope = families.family_of(values).rope
    architecture = families.architecture_of(values)
    kind = table.get("rope_type", table.get("type", "default"))
    kind = "default" if kind == rope.alias else kind
    needed = _NEEDED.get(kind, ())
    optional = rope.options.get(kind, _OPTIONAL.get(kind, ()))
    if not rope.kinds or kind in rope.kinds:
        needed = (*needed, *rope.needed)
        optional = (*optional, *rope.optional)
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
    factor = table.get("factor")
    original = table.get("original_max_position_embeddings")
    longest = values.get("max_position_embeddings")
    if kind == "yarn" and factor and original and longest and longest > factor * original:
        yield (
            f"model.path: max_position_embeddings must be at most factor * "
            f"original_max_position_embeddings = {factor * original:g}, for which rollout servers "
            f"compute positions, got {longest}"
        )
    if rope.problems is not None:
        yield from rope.problems(kind, table, values)
    if rope.is_partial and kind != "default":
        yield f"model.path: rope_type of a {architecture} must be default, got {kind!r}"
    if not rope.is_partial and table.get("partial_rotary_factor") not in (None, 1):
        yield (
            f"model.path: partial_rotary_factor must be 1, got {table['partial_rotary_factor']!r}: "
            "transformers, learner and rollout servers would compute different models"
        )
