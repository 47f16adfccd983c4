from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from slipstream.learner.trainer.checkpoints.files import write_safetensors  # noqa: E402


def test_what_is_written_is_read_by_safetensors_and_told_byte_by_byte(tmp_path: Path) -> None:
    tensors = {
        "state": torch.arange(5000, dtype=torch.int64).to(torch.uint8),
        "empty": torch.empty(0, dtype=torch.float32),
        "matrix": torch.linspace(-1, 1, 12).reshape(3, 4).to(torch.bfloat16),
    }
    path, moved = tmp_path / "a.safetensors", []
    beside = tmp_path / "beside"
    beside.touch()
    write_safetensors(path, tensors, moved.append)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert sum(moved) == path.stat().st_size
    # The file has the permissions of the files beside it.
    assert path.stat().st_mode == beside.stat().st_mode
