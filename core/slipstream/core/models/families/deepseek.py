"""Records of DeepSeek V3, and of GLM 4.5 and later with experts, which route like V3."""

from collections.abc import Iterator, Mapping

from slipstream.core.models.family import ANY_BIAS, Experts, Family, Rope, Table, Values

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
)
