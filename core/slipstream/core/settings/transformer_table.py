"""The table `learner.transformer`: which of Megatron's settings would train another model.

Rollout servers sample from the model of config.json. This module does not import Megatron, so that
these rules hold on every machine; a test classifies all fields of the tested version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import JsonValue

SECTION = "learner.transformer"
# Settings that are read from config.json, or belong to architectures that are not supported.
FROM_MODEL = frozenset(
    {
        "activation_func",
        "activation_func_clamp_value",
        "add_bias_linear",
        "add_qkv_bias",
        "apply_residual_connection_post_layernorm",
        "attention_output_gate",
        "beta_fast",
        "beta_slow",
        "dsa_indexer_head_dim",
        "dsa_indexer_loss_coeff",
        "dsa_indexer_n_heads",
        "dsa_indexer_topk",
        "dsa_indexer_use_sparse_loss",
        "experimental_attention_variant",
        "gated_linear_unit",
        "glu_linear_offset",
        "heterogeneous_block_specs",
        "is_hybrid_model",
        "kv_lora_rank",
        "layernorm_epsilon",
        "layernorm_zero_centered_gamma",
        "linear_attention_freq",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_num_heads",
        "mamba_state_dim",
        "moe_apply_probs_on_input",
        "moe_latent_size",
        "moe_layer_freq",
        "moe_router_group_topk",
        "moe_router_num_groups",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk_limited_devices",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_gate",
        "moe_shared_expert_intermediate_size",
        "mrope_section",
        "mscale",
        "mscale_all_dim",
        "multi_latent_attention",
        "no_rope_freq",
        "normalization",
        "original_max_position_embeddings",
        "parallel_output",
        "position_embedding_type",
        "q_lora_rank",
        "qk_head_dim",
        "qk_l2_norm",
        "qk_layernorm",
        "qk_pos_emb_head_dim",
        "rope_scaling",
        "rope_scaling_factor",
        "rope_type",
        "rotary_interleaved",
        "rotary_percent",
        "rotary_scaling_factor",
        "scatter_embedding_sequence_parallel",
        "seq_len_interpolation_factor",
        "softmax_scale",
        "softmax_type",
        "use_arbitrary_attention_mask",
        "v_head_dim",
        "window_attn_skip_freq",
        "window_size",
    }
)
# Settings that change training only: noise, forced routing, experts that drop tokens.
OFF = frozenset(
    {
        "apply_query_key_layer_scaling",
        "attention_dropout",
        "hidden_dropout",
        "moe_enable_routing_replay",
        "moe_expert_capacity_factor",
        "moe_input_jitter_eps",
        "moe_pad_expert_input_to_capacity",
        "moe_router_enable_expert_bias",
        "moe_router_force_load_balancing",
        "moe_token_drop_policy",
        "moe_token_dropping",
        "mtp_enabled",
        "mtp_standalone",
        "qk_clip",
        "quant_recipe",
        "restore_modelopt_state",
    }
)
_BALANCING = "moe_router_load_balancing_type"


def policy_problems(transformer: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yields one line for each setting with which training and sampling policy would differ."""
    for name, value in transformer.items():
        if name in FROM_MODEL:
            yield f"{SECTION}.{name} cannot be set, got {value!r}: config.json decides it"
        elif name in OFF and value:
            yield (
                f"{SECTION}.{name} must be left out, got {value!r}: rollout servers do not "
                "compute so, and the policy that is trained must be the one that samples"
            )
    balancing = transformer.get(_BALANCING)
    kinds = balancing if isinstance(balancing, list) else [balancing]
    if "sinkhorn" in kinds:
        yield (
            f"{SECTION}.{_BALANCING} must not be sinkhorn: it chooses other experts than rollout "
            "servers do, and the policy that is trained must be the one that samples"
        )
