"""Torch's functions that a rank on a CPU replaces obey a device that is set around them."""

from pathlib import Path

import torch
from support.ranks.rank_pool import RankPool


def run_rank(folder: Path, job: str) -> None:
    """On a rank: transformers makes models so, and leaves what is not on `meta` without values."""
    with torch.device(job):
        tensors = [
            torch.arange(3),
            torch.zeros(2),
            torch.empty_like(torch.empty(1)),
            torch.tensor(4),
        ]
    (folder / job).write_text(" ".join(tensor.device.type for tensor in tensors))


def test_tensors_made_under_a_device_are_on_it(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(Path(__file__), ["meta"], world_size=1, folder=tmp_path)
    assert (tmp_path / "meta").read_text() == "meta meta meta meta"
