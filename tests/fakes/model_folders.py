"""Hugging Face folders that pass all checks of their files, and that nothing can load."""

from __future__ import annotations

import json
from pathlib import Path


def write_safetensors(path: Path, num_bytes: int = 0) -> None:
    """One tensor of `num_bytes` bytes."""
    tensor = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))


def write_loadable_files(folder: Path) -> None:
    """Weights and tokenizer beside the config.json that the test writes."""
    write_safetensors(folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
