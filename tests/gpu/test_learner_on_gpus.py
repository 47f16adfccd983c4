"""What a trainer does with its memory, precision, adapters and other models, on one GPU."""

from pathlib import Path

import pytest
import torch
from support.fakes.parity_models import make_models
from support.ranks import lora_ranks, memory_ranks, role_ranks
from support.ranks.memory_ranks import DETERMINISTIC_JOBS, GPU_JOBS
from support.ranks.rank_pool import RankPool
from support.rigs.parity_run import COMPARED

pytestmark = pytest.mark.timeout(600)
MEMORY_JOBS = ("plain", "plain-offload", "bf16", "bf16-offload", "fp8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learner")
    make_models(folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path, rank_pool: RankPool) -> dict[str, dict]:
    return run_memory(rank_pool, folder, MEMORY_JOBS)


def run_memory(pool: RankPool, folder: Path, jobs: tuple[str, ...]) -> dict[str, dict]:
    pool.run(Path(memory_ranks.__file__), jobs, world_size=1, folder=folder)
    return {
        name: torch.load(folder / f"memory-{name}.pt", weights_only=True)
        for name in jobs
    }


@pytest.mark.parametrize("name", ["plain", "bf16"])
def test_offloading_frees_the_device_and_changes_no_figure(
    name: str, found: dict[str, dict]
) -> None:
    away = found[f"{name}-offload"]
    plain = found[name]
    for between in away["between"]:
        assert between == {"parameters": 0, "gradients": 0, "optimizer": 0}
    assert away["inside"] == plain["inside"]
    # Kernels that add up in any order leave the last bits open.
    for ours, theirs in zip(away["metrics"], plain["metrics"], strict=True):
        for key in ("loss", "grad_norm", "entropy"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-4)


def test_bfloat16_trains_like_float32_within_its_rounding(
    found: dict[str, dict],
) -> None:
    for ours, exact in zip(
        found["bf16"]["metrics"], found["plain"]["metrics"], strict=True
    ):
        assert ours["loss"] == pytest.approx(exact["loss"], abs=0.03)
        assert ours["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)


def test_products_in_8_bits_train_like_bfloat16_within_their_rounding(
    found: dict[str, dict],
) -> None:
    steps = list(zip(found["fp8"]["metrics"], found["bf16"]["metrics"], strict=True))
    for ours, theirs in steps:
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.1)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.3)
    # The entropies differ: the fp8 run did compute in 8 bits.
    assert any(
        abs(ours["entropy"] - theirs["entropy"]) > 1e-4 for ours, theirs in steps
    )


def test_optimizer_on_the_host_makes_the_same_steps(
    folder: Path, rank_pool: RankPool, found: dict[str, dict]
) -> None:
    (host,) = run_memory(rank_pool, folder, tuple(GPU_JOBS)).values()
    plain = found["bf16"]
    for ours, theirs in zip(host["metrics"], plain["metrics"], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=3e-3)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-3)
    assert host["inside"]["optimizer"] < 0.1 * plain["inside"]["optimizer"]


def test_deterministic_kernels_give_the_same_bits_again(
    folder: Path, rank_pool: RankPool
) -> None:
    exact = run_memory(rank_pool, folder, tuple(DETERMINISTIC_JOBS))
    for name in ("exact-again", "exact-offload"):
        for ours, theirs in zip(
            exact[name]["metrics"], exact["exact"]["metrics"], strict=True
        ):
            assert {key: ours[key] for key in COMPARED} == {
                key: theirs[key] for key in COMPARED
            }
        assert exact[name]["digests"] == exact["exact"]["digests"]
        assert torch.equal(exact[name]["logprobs"], exact["exact"]["logprobs"])


def test_adapters_train_and_nothing_else(folder: Path, rank_pool: RankPool) -> None:
    rank_pool.run(Path(lora_ranks.__file__), ["one"], world_size=1, folder=folder)
    result = torch.load(folder / "lora-one.pt", weights_only=True)
    before = result["before"]
    after = result["weights"]
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    # Seven matrices in each of four layers.
    assert len(moved) == 28
    assert all(name.endswith("_proj.weight") for name in moved)
    assert result["state_elements"] == 2 * result["trained_elements"]
    assert all(step["grad_norm"] > 0 for step in result["metrics"])


def test_critic_and_reference_take_part_in_a_step(
    folder: Path, rank_pool: RankPool
) -> None:
    rank_pool.run(Path(role_ranks.__file__), ["one"], world_size=1, folder=folder)
    result = torch.load(folder / "one-0.pt", weights_only=True)
    # The critic trains alone in the first step.
    assert result["is_policy_same"] == [True, False, False]
    assert all(step["critic_grad_norm"] > 0 for step in result["metrics"])
    assert result["metrics"][0]["kl_reference"] == pytest.approx(0.0, abs=1e-5)
    # The reference takes the policy's weights after the second step.
    first, second, _ = result["references"]
    assert not torch.equal(first, second)
    torch.testing.assert_close(
        result["refreshed"], result["policy"], rtol=1e-3, atol=1e-4
    )
