"""Hugging Face folders that pass all checks of their files, and that nothing can load."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.core.models.model_tensors import needed_tensors


def write_safetensors(
    path: Path, num_bytes: int = 0, *, beside: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Writes one tensor of `num_bytes` bytes; `beside`: shapes of other tensors, without data."""
    tensors = {"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
    for name, shape in (beside or {}).items():
        tensors[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))


def write_loadable_files(folder: Path) -> None:
    """Tokenizer and weights, whose names and shapes are those of the config.json that is there."""
    sizes = folder / "config.json"
    needed = needed_tensors(json.loads(sizes.read_text())) if sizes.exists() else {}
    write_safetensors(folder / "model.safetensors", beside=needed)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
