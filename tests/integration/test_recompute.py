"""A plan of recomputed layers changes no bit of what is trained, but for adapters."""

from pathlib import Path

import pytest
import torch
from support.ranks import recompute_ranks
from support.ranks.rank_pool import RankPool
from support.ranks.recompute_ranks import JOBS, LAYOUTS

# Other metrics may be no number.
COMPARED = ("loss", "entropy", "grad_norm", "kl", "logprob_gap_max")
COMPARED_OF_CRITIC = ("value_loss", "critic_grad_norm", "value_mean")
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def found(folder: Path, rank_pool: RankPool) -> dict[str, dict]:
    sizes = {job: LAYOUTS[layout][0] for job, (layout, _) in JOBS.items()}
    return rank_pool.found(recompute_ranks, sizes, folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_layers_train_the_same_bits(layout: str, found: dict[str, dict]) -> None:
    plain, planned = found[layout], found[f"{layout}-planned"]
    # Autograd adds the gradients of an adapter's input and of its layer's in another order.
    bound = 1e-7 if layout == "lora" else 0.0
    for ours, theirs in zip(planned["weights"], plain["weights"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=bound)
    compared = COMPARED_OF_CRITIC if layout == "critic" else COMPARED
    for ours, theirs in zip(planned["metrics"], plain["metrics"], strict=True):
        expected = {key: pytest.approx(theirs[key], rel=10 * bound, abs=0.0) for key in compared}
        assert {key: ours[key] for key in compared} == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_pass_leaves_one_layer_and_later_ones_follow_the_plan(layout, found):
    planned = found[f"{layout}-planned"]
    layers = planned["layers"]
    # No memory is left: the last layer is recomputed too.
    assert planned["recomputed"] == [layers - 1, layers, layers]
    assert found[layout]["recomputed"] == [0, 0, 0]
