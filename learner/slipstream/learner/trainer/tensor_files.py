"""Writes tensors to files with the usual permissions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file with the mode of the process's other new files.

    safetensors itself (0.8) makes files that only their owner may read.
    """
    path.touch()
    mode = path.stat().st_mode & 0o777
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)
