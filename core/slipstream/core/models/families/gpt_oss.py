"""The record of gpt-oss."""

from collections.abc import Iterator

from slipstream.core.models.family import (
    FULL,
    OFF,
    SLIDING,
    EngineFacts,
    Experts,
    Family,
    Rope,
    Table,
)


def _window_problems(values: Table) -> Iterator[str]:
    """Yields a line if windowed and full attention do not alternate: vLLM ignores `layer_types`."""
    kinds = values.get("layer_types") or ()
    wrong = [place for place, kind in enumerate(kinds) if kind != (SLIDING, FULL)[place % 2]]
    if wrong:
        yield (
            "model.path: layer_types of a GptOssForCausalLM must alternate from sliding_attention "
            f"on, as rollout servers take it, got {kinds[wrong[0]]!r} for layer {wrong[0]}"
        )


FAMILIES = (
    Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        # vLLM does not read these fields, and uses these values.
        values={
            "attention_bias": (None, True),
            "rms_norm_eps": (None, 1e-5),
            "swiglu_alpha": (None, 1.702),
            "swiglu_limit": (None, 7.0),
            "tie_word_embeddings": OFF,
            "norm_topk_prob": (None, True),
        },
        layer_kinds=(FULL, SLIDING),
        problems=_window_problems,
        # vLLM computes no other kind, has no values of its own for what is needed, and reads no
        # other option.
        rope=Rope(
            kinds=("yarn",), needed=("beta_fast", "beta_slow"), options={"yarn": ("truncate",)}
        ),
        conversion="write them anew in bfloat16 as docs/guides/models.md shows",
        has_sinks=True,
        has_windows=True,
        experts=Experts(is_fused=True, is_normalized=True),
        engine=EngineFacts(is_harmony=True, copies_parameters=True),
        cannot={
            "learner.parallel.etp": "Megatron does not split experts with biases",
            "model.dtype": "vLLM (0.32.0) computes its sinks on GPUs in bfloat16 only",
        },
    ),
)
