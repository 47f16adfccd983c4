"""Every layout trains like one rank with TransformerEngine and nccl, too."""

from pathlib import Path

import pytest
import torch
from support.ranks.parity_layouts import LAYOUTS, PARITY_STEPS, batches, config_of
from support.ranks.rank_pool import RankPool
from support.references.plain_policy import PlainPolicy
from support.rigs import parity_run

pytestmark = pytest.mark.timeout(3600)


MODELS = sorted({layout.model for layout in LAYOUTS.values()})
LAYOUT_OF = {
    model: next(name for name, layout in LAYOUTS.items() if layout.model == model)
    for model in MODELS
}


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
    comparison = parity_run.compare(rank_pool, folder, world_size, dtype)
    too_large = {
        name: value
        for name, value in comparison.items()
        if value > parity_run.TOLERANCES[dtype]
    }
    assert comparison
    assert not too_large


@pytest.fixture(scope="module")
def one_rank(rank_pool: RankPool, folder: Path) -> Path:
    """The folder with the results of one layout of each model."""
    parity_run.compare(rank_pool, folder, 1, "float32", list(LAYOUT_OF.values()))
    return folder


@pytest.mark.parametrize("model", list(LAYOUT_OF))
def test_parity_of_one_rank_with_plain_transformers(model: str, one_rank: Path) -> None:
    name = LAYOUT_OF[model]
    stored = torch.load(one_rank / f"{name}.pt", weights_only=True)["logprobs"]
    plain = PlainPolicy(one_rank / model, config_of(name, one_rank))
    torch.testing.assert_close(stored[0], plain.probe(), rtol=3e-4, atol=3e-4)
    for batch in batches(plain.config)[:PARITY_STEPS]:
        plain.step(batch)
    torch.testing.assert_close(stored[-1], plain.probe(), rtol=1e-3, atol=1e-3)
