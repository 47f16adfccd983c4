"""Adapters that two GPUs share are trained as on one GPU."""

from pathlib import Path

import pytest
import torch
from support.fakes.parity_models import make_models
from support.ranks import lora_ranks
from support.ranks.rank_pool import RankPool

# The job of one GPU, and that of two.
PAIRS = {
    "matrices": ("one-qwen3", "tp2-sp-qwen3"),
    "expert parallel": ("experts-one", "experts-ep2"),
    "expert tensor parallel": ("experts-one", "experts-etp2"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("adapters")
    make_models(folder)
    pool = RankPool()
    try:
        for place in (0, 1):
            jobs = sorted({pair[place] for pair in PAIRS.values()})
            program = Path(lora_ranks.__file__)
            pool.run(program, jobs, world_size=place + 1, folder=folder, limit_s=400)
    finally:
        pool.close()
    return folder


@pytest.mark.parametrize("pair", PAIRS)
def test_two_gpus_train_adapters_like_one(pair: str, folder: Path) -> None:
    alone, shared = (
        torch.load(folder / f"lora-{job}.pt", weights_only=True, map_location="cpu")
        for job in PAIRS[pair]
    )
    for ours, theirs in zip(shared["metrics"], alone["metrics"], strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-5), (
                name
            )
    for name, weight in alone["weights"].items():
        # A weight moves by up to 2e-3.
        torch.testing.assert_close(shared["weights"][name], weight, rtol=0.0, atol=1e-6)
