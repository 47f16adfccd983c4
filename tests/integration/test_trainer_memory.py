"""Offloading changes where bytes lie and no number; precision and sharding are what they say."""

from pathlib import Path

import pytest
import torch
from support.ranks import memory_ranks
from support.ranks.memory_ranks import JOBS
from support.ranks.rank_pool import RankPool

pytestmark = pytest.mark.long

NUM_LAYERS = 2
OFFLOADED = [name for name in JOBS if name.endswith("-offload")]


@pytest.fixture(scope="module")
def found(folder: Path, rank_pool: RankPool) -> dict[str, dict]:
    sizes = {job: size for job, (size, _) in JOBS.items()}
    return rank_pool.found(memory_ranks, sizes, folder, "memory-{}.pt")


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloading_changes_no_bit(name: str, found: dict[str, dict]) -> None:
    plain = found[name.removesuffix("-offload")]
    for key in ("grad_norm", "loss", "entropy"):
        assert [m[key] for m in found[name]["metrics"]] == [
            m[key] for m in plain["metrics"]
        ]
    assert found[name]["digests"] == plain["digests"]
    assert torch.equal(found[name]["logprobs"], plain["logprobs"])


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_bytes_are_gone_between_steps_and_back_inside(
    name: str, found: dict[str, dict]
):
    plain = found[name.removesuffix("-offload")]
    for between in found[name]["between"]:
        assert between == {"parameters": 0, "gradients": 0, "optimizer": 0}
    assert found[name]["inside"] == plain["inside"] == plain["between"][-1]
    assert all(size > 0 for size in plain["inside"].values())


def test_distributed_optimizer_divides_its_bytes_by_the_replicas(
    found: dict[str, dict],
) -> None:
    replicated = found["replicated"]["inside"]
    # float32 weights are their own master weights, in the whole case and in the divided one.
    assert replicated["optimizer"] == 2 * replicated["parameters"]
    share = found["distributed"]["inside"]["optimizer"] / replicated["optimizer"]
    assert 0.5 <= share < 0.55
    half = found["bf16-distributed"]["inside"]
    # Two moments and master weights, 12 bytes for each 2 of a parameter, divided by two replicas.
    assert half["optimizer"] == pytest.approx(6 * half["parameters"] / 2, rel=0.05)


def test_bfloat16_has_float32_master_weights_moments_and_gradients(
    found: dict[str, dict],
) -> None:
    for name in ("bf16", "bf16-distributed"):
        assert found[name]["dtypes"] == {
            "parameters": ["torch.bfloat16"],
            "gradients": ["torch.float32"],
            "optimizer": ["torch.float32"],
        }


def test_bfloat16_trains_like_float32_within_its_rounding(
    found: dict[str, dict],
) -> None:
    for name in ("bf16", "bf16-distributed"):
        for ours, exact in zip(
            found[name]["metrics"], found["plain"]["metrics"], strict=True
        ):
            assert ours["loss"] == pytest.approx(exact["loss"], abs=0.03)
            assert ours["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)
        gap = (found[name]["logprobs"] - found["plain"]["logprobs"]).abs()
        assert gap.mean() < 0.1


def test_fp8_recipe_reaches_the_model_or_is_refused(found: dict[str, dict]) -> None:
    assert found["fp8"] == {
        "error": "learner.transformer.fp8 'hybrid' needs TransformerEngine, which is not installed",
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
    }
