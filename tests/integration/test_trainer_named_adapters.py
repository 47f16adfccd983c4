"""Several adapters in one run are trained as in runs of one each, and saved and loaded as such."""

from pathlib import Path

import pytest
import torch
from support.ranks import named_adapter_ranks
from support.ranks.named_adapter_ranks import ALL, LAYOUTS, NAMES, SLOW, sizes_of
from support.ranks.parity_layouts import STEPS
from support.ranks.rank_pool import RankPool

NUM_LAYERS = 2
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


for_layouts = pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS]
)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, folder: Path, rank_pool: RankPool) -> dict[str, dict]:
    """What the jobs of the layouts saw whose tests are run."""
    items = (item for item in request.session.items if item.path == request.path)
    wanted = sorted({item.callspec.params["layout"] for item in items})
    return rank_pool.found(named_adapter_ranks, sizes_of(wanted), folder)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("name", ["code", "math"])
@for_layouts
def test_each_adapter_is_trained_bit_for_bit_as_in_a_run_of_its_own(layout, name, found):
    ours, alone = found[f"{layout} {ALL}"], found[f"{layout} {name}"]
    assert same(ours["before"][name], alone["before"][""])
    for step, adapters in alone["steps"].items():
        assert same(ours["steps"][step][name], adapters[""]), step
        for key in ("loss", "grad_norm", "entropy", "kl", "trained_tokens"):
            assert ours["metrics"][step][f"adapter/{name}/{key}"] == alone["metrics"][step][key]
    assert not same(ours["steps"][0][name], ours["before"][name])


@for_layouts
def test_an_adapter_without_sequences_is_not_changed_by_a_step(layout: str, found: dict[str, dict]):
    ours = found[f"{layout} {ALL}"]
    # It has momentum from the first step, and weights decay.
    assert same(ours["steps"][1]["code"], ours["steps"][0]["code"])
    assert not any(key.startswith("adapter/code/") for key in ours["metrics"][1])
    for step in range(STEPS):
        assert same(ours["steps"][step]["idle"], ours["before"]["idle"])


@for_layouts
def test_gradients_of_an_adapter_are_clipped_by_its_own_norm(layout: str, found: dict[str, dict]):
    metrics = found[f"{layout} {ALL}"]["metrics"][0]
    norms = [metrics[f"adapter/{name}/grad_norm"] for name in ("code", "math")]
    # Both are cut: by the norm of all gradients together each would differ from its own run.
    assert min(norms) > 0.05
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 2)


@for_layouts
def test_adapters_go_on_from_a_checkpoint_bit_for_bit(layout: str, found: dict[str, dict]) -> None:
    ours = found[f"{layout} {ALL}"]
    for name in NAMES:
        assert same(ours["loaded"][name], ours["steps"][STEPS - 2][name])
        assert same(ours["retrained"][name], ours["steps"][STEPS - 1][name])
    assert not same(ours["loaded"]["code"], ours["loaded"]["math"])
