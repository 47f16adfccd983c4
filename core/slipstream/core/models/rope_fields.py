"""The rotary embedding in a model's config.json: which settings all programs compute alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

GEMMA = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
# Architectures with layers of several kinds: some have windows.
ALTERNATING = (*GEMMA, "GptOssForCausalLM")
LAYER_KINDS = ("full_attention", "sliding_attention")
# Qwen3.5, dense and with experts: the language model alone, and with a vision tower.
QWEN35 = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
QWEN35_VISION = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
# Architectures with delta nets, whose attention is gated.
DELTA_NETS = ("Qwen3NextForCausalLM", *QWEN35, *QWEN35_VISION)
# Architecture -> its kinds of rotary embedding, if they are not all that are known.
_KINDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(GEMMA, ("default", "linear")),
    # vLLM computes no other for it.
    "GptOssForCausalLM": ("yarn",),
    "Qwen2_5_VLForConditionalGeneration": ("default",),
    "Qwen3VLForConditionalGeneration": ("default",),
    "Qwen3VLMoeForConditionalGeneration": ("default",),
    **dict.fromkeys(QWEN35_VISION, ("default",)),
}
# Architectures with latent attention.
LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
# Architectures with a vision tower, whose positions have three axes.
VISION = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    *QWEN35_VISION,
)
# Architectures whose positions turn a part of each head.
_PARTIAL = ("Glm4MoeForCausalLM", *DELTA_NETS)
_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_LLAMA3_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
# Kind of rotary embedding -> further keys that it needs: the programs' defaults differ.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": _LLAMA3_KEYS,
    "yarn": ("factor", "original_max_position_embeddings"),
}
# Kind -> keys that it may have besides.
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
    ),
}


def architecture_of(values: Mapping[str, Any]) -> str:
    """Returns the model's class by the table of a config.json; "" if it has none."""
    return str((values.get("architectures") or [""])[0])


def rope_table(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the table of the rotary embedding, chosen like transformers from its two names."""
    table = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return table if isinstance(table, Mapping) else {}


def rope_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields one line for each setting for which the programs would compute differently."""
    new, old = values.get("rope_parameters"), values.get("rope_scaling")
    if new and old and new != old:
        yield "model.path: config.json has both rope_parameters and rope_scaling, which differ"
    table = rope_table(values)
    if architecture_of(values) in GEMMA and set(table) & set(LAYER_KINDS):
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
    """Checks one table of a rotary embedding."""
    is_partial = architecture_of(values) in _PARTIAL
    kind = table.get("rope_type", table.get("type", "default"))
    needed, optional = _NEEDED.get(kind, ()), _OPTIONAL.get(kind, ())
    if architecture_of(values) == "GptOssForCausalLM" and kind == "yarn":
        # vLLM has no values of its own for the first two, and reads no other.
        needed, optional = (*needed, "beta_fast", "beta_slow"), ("truncate",)
    if architecture_of(values) in VISION:
        # Published files call the same kind by another name.
        kind = "default" if kind == "mrope" else kind
        needed, optional = (*needed, "mrope_section"), (*optional, "mrope_interleaved")
    if architecture_of(values) in QWEN35:
        # Text has one axis of positions: vLLM takes these away.
        optional = (*optional, "mrope_section", "mrope_interleaved")
    kinds = _KINDS.get(architecture_of(values), (kind,))
    if kind not in kinds:
        yield (
            f"model.path: the rope_type of a {architecture_of(values)} must be one of "
            f"{', '.join(kinds)}, got {kind!r}"
        )
    for name in sorted(set(table) - {*_ROPE_KEYS, *needed, *optional}):
        yield (
            f"model.path: {name} in rope_parameters is not computed with for the rope_type "
            f"{kind!r}, got {table[name]!r}"
        )
    for name in (name for name in needed if table.get(name) is None):
        yield f"model.path: the rope_type {kind!r} needs {name} in rope_parameters"
    yield from _yarn_problems(kind, table, values)
    if architecture_of(values) in QWEN35_VISION and table.get("mrope_section"):
        yield from _axes_problems(table, values)
    if architecture_of(values) in LATENT and kind != "default":
        yield from _latent_problems(kind, table)
    if is_partial and kind != "default":
        yield f"model.path: rope_type of a {architecture_of(values)} must be default, got {kind!r}"
    if not is_partial and table.get("partial_rotary_factor") not in (None, 1):
        yield (
            f"model.path: partial_rotary_factor must be 1, got {table['partial_rotary_factor']!r}: "
            "transformers, learner and rollout servers would compute different models"
        )


def _axes_problems(table: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Checks the three axes of positions, which share the turned part of each head in turn."""
    architecture, sections = architecture_of(values), table["mrope_section"]
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


def _latent_problems(kind: str, table: Mapping[str, Any]) -> Iterator[str]:
    """Checks the positions of latent attention, which turn only a part of each head."""
    if kind != "yarn":
        yield f"model.path: the rope_type of latent attention must be default or yarn, got {kind!r}"
    mscale, of_all = table.get("mscale"), table.get("mscale_all_dim")
    if not mscale or mscale != of_all or table.get("attention_factor") is not None:
        yield (
            "model.path: mscale and mscale_all_dim of latent attention must be the same number "
            f"without an attention_factor, got {mscale!r} and {of_all!r}"
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
