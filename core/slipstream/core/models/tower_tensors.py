"""Names and shapes of a vision tower's tensors, by the config.json of a model that sees images."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from slipstream.core.errors import ConfigError
from slipstream.core.models.nested_decoders import TOWERS, is_nested, tower_name
from slipstream.core.models.rope_fields import QWEN35_VISION, VISION, architecture_of

Shape: TypeAlias = tuple[int, ...]

_BLOCK = re.compile(r".*?\.(blocks|layers|deepstack_merger_list)\.\d+\.")
# Folders of the tensors of towers, of all families.
TOWER_FOLDERS = ("visual.", "model.visual.", *TOWERS)
# transformers' defaults for fields that vision_config leaves out.
_PATCHES = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}
_SECOND = {
    **_PATCHES,
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
    "patch_size": 14,
}
_THIRD = {
    **_PATCHES,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
_PIXTRAL = {
    "num_channels": 3,
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "patch_size": 16,
}
_DEFAULTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {VISION[0]: _SECOND, **dict.fromkeys(VISION[1:], _THIRD)}
)


def deep_layers(values: Mapping[str, Any]) -> int:
    """Returns the number of layers behind which the tower of a config.json adds features."""
    default = (8, 16, 24) if architecture_of(values) in VISION[1:3] else ()
    found = (values.get("vision_config") or {}).get("deepstack_visual_indexes", default)
    return len(found or ())


def tower_tensors(values: Mapping[str, Any], held: Collection[str]) -> dict[str, Shape]:
    """Returns name and shape of each tensor of a tower, in files with the tensors `held`.

    ConfigError for sizes in vision_config that are no numbers, or do not fit the decoder.
    """
    if is_nested(values):
        sizes = _sizes(values, _PIXTRAL)
        found = _pixtral(sizes) | _projector(sizes["hidden_size"], values)
        return {tower_name(name, held): shape for name, shape in found.items()}
    architecture = architecture_of(values)
    sizes = _sizes(values, _DEFAULTS[architecture])
    if sizes["out_hidden_size"] != values.get("hidden_size"):
        raise ConfigError(
            f"out_hidden_size in vision_config must be the hidden_size of the decoder, "
            f"{values.get('hidden_size')}, got {sizes['out_hidden_size']}"
        )
    if architecture == VISION[0]:
        return {f"visual.{name}": shape for name, shape in _second(sizes).items()}
    found = _third(sizes, deep=0 if architecture in QWEN35_VISION else deep_layers(values))
    return {f"model.visual.{name}": shape for name, shape in found.items()}


def further_blocks(tower: Collection[str], held: Collection[str]) -> list[str]:
    """Returns the names in `held` that lie in blocks of a tower beside those in `tower`."""
    known = {_block(name) for name in tower}
    return [name for name in held if name.startswith(TOWER_FOLDERS) and _block(name) not in known]


def _block(name: str) -> str:
    """Returns the part of a name up to the number of its block; "" if it is in none."""
    found = _BLOCK.match(name)
    return found[0] if found else ""


def _sizes(values: Mapping[str, Any], defaults: Mapping[str, int]) -> dict[str, int]:
    table = values.get("vision_config") or {}
    found = {name: table.get(name, default) for name, default in defaults.items()}
    for name, size in found.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"{name} in vision_config must be a number above 0, got {size!r}")
    return found


def _linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _patch_shape(sizes: Mapping[str, int]) -> Shape:
    side = sizes["patch_size"]
    return (sizes["hidden_size"], sizes["in_channels"], sizes["temporal_patch_size"], side, side)


def _blocks(number: int, folder: str, within: Mapping[str, Shape]) -> dict[str, Shape]:
    return {
        f"{folder}.{place}.{name}": shape
        for place in range(number)
        for name, shape in within.items()
    }


def _second(sizes: Mapping[str, int]) -> dict[str, Shape]:
    """Returns the tensors of Qwen2.5-VL's tower."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    merged = hidden * sizes["spatial_merge_size"] ** 2
    block = {
        "norm1.weight": (hidden,),
        "norm2.weight": (hidden,),
        **_linear("attn.qkv", 3 * hidden, hidden),
        **_linear("attn.proj", hidden, hidden),
        **_linear("mlp.gate_proj", inner, hidden),
        **_linear("mlp.up_proj", inner, hidden),
        **_linear("mlp.down_proj", hidden, inner),
    }
    return {
        "patch_embed.proj.weight": _patch_shape(sizes),
        **_blocks(sizes["depth"], "blocks", block),
        "merger.ln_q.weight": (hidden,),
        **_linear("merger.mlp.0", merged, merged),
        **_linear("merger.mlp.2", sizes["out_hidden_size"], merged),
    }


def _third(sizes: Mapping[str, int], *, deep: int) -> dict[str, Shape]:
    """Returns the tensors of the tower of Qwen3-VL and Qwen3.5, with `deep` further mergers."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    merged = hidden * sizes["spatial_merge_size"] ** 2
    norms = {
        f"{norm}.{kind}": (hidden,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")
    }
    block = {
        **norms,
        **_linear("attn.qkv", 3 * hidden, hidden),
        **_linear("attn.proj", hidden, hidden),
        **_linear("mlp.linear_fc1", inner, hidden),
        **_linear("mlp.linear_fc2", hidden, inner),
    }

    def merger(normed: int) -> dict[str, Shape]:
        return {
            "norm.weight": (normed,),
            "norm.bias": (normed,),
            **_linear("linear_fc1", merged, merged),
            **_linear("linear_fc2", sizes["out_hidden_size"], merged),
        }

    return {
        "patch_embed.proj.weight": _patch_shape(sizes),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (sizes["num_position_embeddings"], hidden),
        **_blocks(sizes["depth"], "blocks", block),
        **{f"merger.{name}": shape for name, shape in merger(hidden).items()},
        **_blocks(deep, "deepstack_merger_list", merger(merged)),
    }


def _pixtral(sizes: Mapping[str, int]) -> dict[str, Shape]:
    hidden, inner, side = sizes["hidden_size"], sizes["intermediate_size"], sizes["patch_size"]
    block = {
        "attention_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        **{f"attention.{name}_proj.weight": (hidden, hidden) for name in "qkvo"},
        "feed_forward.gate_proj.weight": (inner, hidden),
        "feed_forward.up_proj.weight": (inner, hidden),
        "feed_forward.down_proj.weight": (hidden, inner),
    }
    found = {
        "patch_conv.weight": (hidden, sizes["num_channels"], side, side),
        "ln_pre.weight": (hidden,),
        **_blocks(sizes["num_hidden_layers"], "transformer.layers", block),
    }
    return {f"vision_tower.{name}": shape for name, shape in found.items()}


def _projector(hidden: int, values: Mapping[str, Any]) -> dict[str, Shape]:
    """Returns the tensors between a tower of size `hidden` and the decoder of Mistral 3."""
    outer, merge = values["hidden_size"], values.get("spatial_merge_size", 2)
    found = {
        "norm.weight": (hidden,),
        "patch_merger.merging_layer.weight": (hidden, hidden * merge**2),
        **_linear("linear_1", outer, hidden),
        **_linear("linear_2", outer, outer),
    }
    if not values.get("multimodal_projector_bias"):
        found = {name: shape for name, shape in found.items() if not name.endswith(".bias")}
    return {f"multi_modal_projector.{name}": shape for name, shape in found.items()}
