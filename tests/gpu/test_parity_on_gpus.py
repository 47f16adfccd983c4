"""Every layout trains like one rank with TransformerEngine and nccl, too."""

from __future__ import annotations

from pathlib import Path

import parity_run
import pytest
import torch
from parity_layouts import LAYOUTS, config_of
from plain_policy import PlainPolicy
from rank_pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_parity_with_transformer_engine(
    world_size: int, dtype: str, rank_pool: RankPool, folder: Path
) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"fewer than {world_size} GPUs")
    found = parity_run.compare(rank_pool, folder, world_size, dtype)
    too_large = {
        name: value for name, value in found.items() if value > parity_run.TOLERANCES[dtype]
    }
    assert found
    assert not too_large


@pytest.mark.parametrize("model", ["llama", "qwen3", "tied", "moe"])
def test_parity_of_one_rank_with_plain_transformers(
    model: str, rank_pool: RankPool, folder: Path
) -> None:
    name = next(n for n, layout in LAYOUTS.items() if layout.model == model)
    parity_run.compare(rank_pool, folder, 1, "float32", [name])
    found = torch.load(folder / f"{name}.pt", weights_only=True)["logprobs"][0]
    plain = PlainPolicy(folder / model, config_of(name, folder))
    torch.testing.assert_close(found, plain.probe(), rtol=1e-3, atol=1e-3)
