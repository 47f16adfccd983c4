"""Copy plans that quantise to FP8 against vLLM's own loader, bit for bit, alone and sharded."""

import pytest
from support.ranks.fp8_ranks import Quantised, quantised

pytestmark = pytest.mark.long

SHAPES = ["llama_tied", "qwen2_with_bias", "qwen3_with_qk_norm"]
Outcomes = dict[int, list[dict[str, Quantised]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("models")
    return {tp_size: quantised(folder, tp_size) for tp_size in (1, 2)}


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantising_by_the_plan_gives_the_loaders_bits_in_place(outcomes, shape, tp_size):
    for rank in outcomes[tp_size]:
        found = rank[shape]
        assert found.different == ()
        assert not found.moved
        # Four matrices and their scales in each of two blocks.
        assert found.num_matrices == 8
        assert len([name for name in found.changed if name.endswith("weight_scale")]) == 8


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_proof_accepts_the_loaders_bits_and_no_others(outcomes, shape, tp_size):
    for rank in outcomes[tp_size]:
        assert rank[shape].proof is None
        assert len(rank[shape].proofs_of_altered) == 16
        assert None not in rank[shape].proofs_of_altered


def test_matrices_share_landings(outcomes: Outcomes) -> None:
    for ranks in outcomes.values():
        for found in ranks[0].values():
            assert 0 < found.landing_bytes < 0.7 * found.plain_bytes
