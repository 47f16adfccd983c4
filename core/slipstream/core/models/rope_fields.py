"""The rotary embedding in a model's config.json: which settings all programs compute alike."""

from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.core.models.family import FULL, SLIDING
from slipstream.core.models.registry import architecture_of, family_of

_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
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
    )
}


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
    """Checks one table of a rotary embedding."""
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
