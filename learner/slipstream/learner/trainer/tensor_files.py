"""Writes tensors to files that whoever may read their neighbours may read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file with the mode that the process gives to every new file.

    safetensors itself leaves files that only their owner may read (0.8).
    """
    path.touch()
    mode = path.stat().st_mode & 0o777
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)
