"""Records of DeepSeek V3, and of GLM 4.5 to 4.7, MiniMax M2 and K-EXAONE, which route like it."""

from collections.abc import Iterator, Mapping

from slipstream.core.models.family import (
    ANY_BIAS,
    FULL,
    OFF,
    SLIDING,
    UNSHARED,
    Experts,
    Family,
    Rope,
    Table,
    Values,
)

# Routers with a sigmoid: the weights of a token's experts always add up to routed_scaling_factor.
_SIGMOID: Mapping[str, Values] = {
    "norm_topk_prob": (None, True),
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
}
_READ_OF_EXPERTS = (
    *("n_routed_experts", "n_group", "topk_group", "routed_scaling_factor"),
    # The layers that predict further tokens are neither loaded nor sampled from.
    *("num_nextn_predict_layers", "num_mtp_layers"),
)
_READ = (
    *_READ_OF_EXPERTS,
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"),
    "v_head_dim",
)


def _rope_problems(kind: str, table: Table, _: Table) -> Iterator[str]:
    """Yields one line for each RoPE setting that a model with latent attention cannot have."""
    if kind == "default":
        return
    if kind != "yarn":
        yield f"model.path: the rope_type of latent attention must be default or yarn, got {kind!r}"
    mscale, of_all = table.get("mscale"), table.get("mscale_all_dim")
    if not mscale or mscale != of_all or table.get("attention_factor") is not None:
        yield (
            "model.path: mscale and mscale_all_dim of latent attention must be the same number "
            f"without an attention_factor, got {mscale!r} and {of_all!r}"
        )


def _dense_problems(values: Table) -> Iterator[str]:
    """Yields a line if the programs would have other layers without experts."""
    kinds, dense = values.get("mlp_layer_types") or [], values.get("first_k_dense_replace") or 0
    if kinds and kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        yield (
            f"model.path: mlp_layer_types must be dense for the first {dense} layers and sparse "
            f"for all others, as first_k_dense_replace says, got {kinds}"
        )


def _turned_problems(values: Table) -> Iterator[str]:
    """Yields a line if vLLM, which reads `rotary_dim`, would turn another part of each head."""
    table = values.get("rope_scaling") or values.get("rope_parameters") or {}
    part = table.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    turned, size = values.get("rotary_dim"), values.get("head_dim") or 0
    if not isinstance(turned, int) or (part is not None and part * size != turned):
        yield (
            "model.path: rotary_dim of a MiniMaxM2ForCausalLM must be the number of turned "
            f"dimensions of its {size} in a head, got {turned} and a part of {part}"
        )


def _score_problems(values: Table) -> Iterator[str]:
    """Yields a line if learner and transformers would rank expert groups differently."""
    groups, chosen, of_token = (
        values.get(name) or 0 for name in ("n_group", "topk_group", "num_experts_per_tok")
    )
    if groups > 1 and chosen and of_token // chosen != 2:
        yield (
            "model.path: num_experts_per_tok must be 2 * topk_group, since the learner scores a "
            "group by its best num_experts_per_tok / topk_group experts and transformers by its "
            f"best 2, got {of_token} and {chosen}"
        )


FAMILIES = (
    Family(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        values={
            **_SIGMOID,
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            # transformers norms latent vectors with 1e-6, vLLM with the value in config.json.
            "rms_norm_eps": (None, 1e-6, 1e-5),
        },
        read=_READ,
        written=("scoring_func", "topk_method"),
        problems=_score_problems,
        rope=Rope(problems=_rope_problems),
        has_latent_attention=True,
        experts=Experts(),
    ),
    Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        values={**_SIGMOID, "attention_bias": ANY_BIAS, "use_qk_norm": ANY_BIAS},
        read=(*_READ_OF_EXPERTS, "partial_rotary_factor"),
        rope=Rope(is_partial=True),
        experts=Experts(),
    ),
    Family(
        architecture="Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        values={
            **_SIGMOID,
            # vLLM needs the number, which transformers does not read.
            "first_k_dense_replace": (1,),
            # vLLM always has a separate output projection.
            "tie_word_embeddings": OFF,
            # transformers norms latent vectors with 1e-6, vLLM with the value in config.json.
            "rms_norm_eps": (None, 1e-6, 1e-5),
        },
        read=(*_READ, "mlp_layer_types"),
        written=("first_k_dense_replace",),
        problems=_dense_problems,
        rope=Rope(problems=_rope_problems),
        has_latent_attention=True,
        experts=Experts(is_normalized=True),
    ),
    Family(
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        values={
            **UNSHARED,
            # The weights of a token's experts always add up to 1, and experts have biases.
            "norm_topk_prob": (None, True),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "qk_norm_type": (None, "per_layer"),
            # vLLM always has a separate output projection.
            "tie_word_embeddings": OFF,
            "use_qk_norm": (None, True),
        },
        read=(
            *("rotary_dim", "partial_rotary_factor"),
            # The layers that predict further tokens are neither loaded nor sampled from.
            *("num_mtp_modules", "use_mtp", "mtp_transformer_layers"),
        ),
        written=("scoring_func", "use_routing_bias"),
        problems=_turned_problems,
        rope=Rope(is_partial=True),
        query_norm="whole",
        experts=Experts(is_normalized=True),
    ),
    Family(
        architecture="ExaoneMoeForCausalLM",
        model_type="exaone_moe",
        values=_SIGMOID,
        read=(
            *("routed_scaling_factor", "mlp_layer_types"),
            # The layers that predict further tokens are neither loaded nor sampled from.
            "num_nextn_predict_layers",
        ),
        # transformers has one such layer if config.json does not say how many.
        written=("first_k_dense_replace",),
        layer_kinds=(FULL, SLIDING),
        problems=_dense_problems,
        query_norm="head",
        has_windows=True,
        experts=Experts(is_normalized=True),
    ),
)
