"""Hugging Face folders that pass all checks of their files, and that nothing can load."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.core.models.model_sizes import ModelSizes


def write_safetensors(
    path: Path, num_bytes: int = 0, *, beside: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Writes one tensor of `num_bytes` bytes; `beside`: shapes of other tensors, without data."""
    tensors = {
        "w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    }
    for name, shape in (beside or {}).items():
        tensors[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))


def loadable_tensors(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors of a folder that passes the checks, by its config.json."""
    sizes = ModelSizes.of(values)
    matrix = (sizes.vocab, sizes.hidden)
    shapes = {"model.embed_tokens.weight": matrix, "model.norm.weight": (sizes.hidden,)}
    for layer in range(sizes.layers):
        for part in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{part}.weight"] = (sizes.hidden,)
    return shapes if sizes.has_tied_output else shapes | {"lm_head.weight": matrix}


def write_loadable_files(folder: Path) -> None:
    """Tokenizer and weights, which fit the config.json that is there."""
    sizes = folder / "config.json"
    tensors = loadable_tensors(json.loads(sizes.read_text())) if sizes.exists() else {}
    write_safetensors(folder / "model.safetensors", beside=tensors)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
