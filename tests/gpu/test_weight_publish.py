"""What leaves trainers on GPUs in buckets is what an export of theirs holds."""

from pathlib import Path

import pytest
import torch
from support.fakes.parity_models import make_models
from support.ranks import stream_ranks
from support.ranks.parity_layouts import LAYOUTS
from support.ranks.rank_pool import RankPool

pytestmark = pytest.mark.timeout(600)
STREAMED = [
    "one", "one-tied", "one-moe", "tp2", "tp2-odd", "tp2-sp-qwen3", "pp2-tied", "pp2-vpp2",
    "ep2-moe", "tp2-pp2-tied", "pp2-vpp2-ep2-moe",
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_buckets_on_the_gpu_are_the_export(
    world_size: int, dtype: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"fewer than {world_size} GPUs")
    make_models(tmp_path)
    names = [name for name in STREAMED if LAYOUTS[name].world_size == world_size]
    jobs = [name if dtype == "float32" else f"{name}@{dtype}" for name in names]
    program = Path(stream_ranks.__file__)
    rank_pool.run(program, jobs, world_size=world_size, folder=tmp_path)
    for job in jobs:
        ranks = [
            torch.load(tmp_path / f"{job}-stream-{rank}.pt", weights_only=True)
            for rank in range(world_size)
        ]
        for number in range(2):
            sent = {}
            for rank in ranks:
                sent |= rank["passes"][number]["tensors"]
            exported = ranks[0]["passes"][number]["exported"]
            assert set(sent) == set(exported)
            assert all(
                torch.equal(sent[name], tensor) for name, tensor in exported.items()
            ), job
