"""Copy plans of real vLLM models against their own loader, bit for bit, alone and sharded."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from loader_ranks import SHAPES, Outcome, outcomes  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Outcome]:
    (found,) = outcomes(folder, 1, SHAPES)
    return found


@pytest.fixture(scope="module")
def sharded(folder: Path) -> list[dict[str, Outcome]]:
    return outcomes(folder, 2, SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_replayed_plan_equals_the_loader(alone, shape: str) -> None:
    assert alone[shape].different == ()
    assert alone[shape].changed > 10


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_replayed_plan_equals_the_loader_on_each_tensor_parallel_rank(
    sharded, shape: str, rank: int
) -> None:
    assert sharded[rank][shape].different == ()
    assert sharded[rank][shape].changed > 10


def test_every_expert_has_copies_of_its_own(alone) -> None:
    # Two layers of four experts with three matrices, instead of two layers with three.
    assert alone["qwen3_moe"].num_copies == alone["qwen3_with_qk_norm"].num_copies + 2 * (
        4 * 3 - 3 + 1
    )


def test_the_proof_accepts_what_the_loader_did_and_nothing_else(alone) -> None:
    for outcome in alone.values():
        assert outcome.proof is None
        assert outcome.proof_of_altered is not None
