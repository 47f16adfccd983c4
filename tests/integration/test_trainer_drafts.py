"""The layer that drafts is trained, published, saved and loaded in several layouts of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.ranks.lora_ranks import save
from support.ranks.parity_layouts import OVERLAP, batches
from support.ranks.rank_pool import RankPool
from support.ranks.rank_program import kept, opened, settings_of

TP2 = {"parallel": {"tp": 2}, "transformer": {"sequence_parallel": False}}
# name -> (ranks, model, changes of the learner)
LAYOUTS: dict[str, tuple[int, str, dict]] = {
    "one": (1, "llama", {}),
    "one-away": (1, "llama", {"offload": {"parameters": True}}),
    "one-shared": (1, "llama", {"shared_prefix_tokens": 1}),
    "tp2": (2, "llama", TP2),
    "tp2-sequences": (2, "llama", {"parallel": {"tp": 2}}),
    "dp2": (2, "llama", {}),
    "dp2-sharded": (2, "llama", {"ddp": {"use_distributed_optimizer": True}}),
    "dp2-overlapping": (2, "llama", OVERLAP),
    "cp2": (2, "llama", {"parallel": {"cp": 2}}),
    "ep2": (2, "moe", {"parallel": {"ep": 2}}),
}


def run_rank(folder: Path, job: str) -> None:
    """A rank's part of the layout `job`: two steps, a save, another step, a load, that step."""
    from slipstream.extensions.drafts.trainer import DraftTraining
    from slipstream.learner.trainer.checkpoints.disk_work import DiskWork
    from slipstream.learner.trainer.checkpoints.distributed_files import load_models
    from slipstream.learner.trainer.checkpoints.stored_model import stored_policy
    from slipstream.learner.trainer.model.model import MemoryPart
    from slipstream.learner.trainer.step import TrainingStep
    from slipstream.learner.trainer.weights.weight_publisher import open_published

    ranks, model, changes = LAYOUTS[job]
    config = settings_of(
        folder / model,
        {
            "learner": {"world_size": ranks, "micro_batch_tokens": 400} | changes,
            "drafts": {"tokens": 2, "learning_rate": 0.01},
        },
    )
    policy = opened(config)
    layer = policy.drafts
    assert layer is not None
    part = DraftTraining(layer, policy, config)
    step = TrainingStep(policy, config, [part])
    published = open_published(policy, config)
    first = published.digests()
    stored = stored_policy(policy)
    disk = DiskWork(folder, policy.ranks)
    metrics = []
    values = [layer.values.detach().clone()]
    path = folder / f"drafts-{job}"
    for number, batch in enumerate(batches(config)):
        if number == 2:
            with policy.memory.resident(MemoryPart.PARAMETERS):
                save(stored, path, disk)
        metrics.append(step.run(batch).metrics)
        values.append(layer.values.detach().clone())
    digests = published.digests()
    with policy.memory.resident(MemoryPart.PARAMETERS):
        load_models(stored, path, disk)
    loaded = layer.values.detach().clone()
    step.run(batches(config)[2])
    found = {
        "metrics": metrics,
        "values": values,
        "first": first.by_name,
        "names": digests.by_name,
        "loaded": loaded,
        "again": layer.values.detach().clone(),
        "published again": published.digests().by_name,
    }
    kept(policy, found, folder / f"{job}.pt")


NUM_LAYERS = 2
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def found(folder: Path, rank_pool: RankPool) -> dict[str, dict]:
    sizes = {name: ranks for name, (ranks, _, _) in LAYOUTS.items()}
    return rank_pool.found(__file__, sizes, folder)


@pytest.mark.parametrize("layout", ["one-away", "tp2", "tp2-sequences", "dp2"])
def test_layouts_train_the_layer_like_one_rank(
    layout: str, found: dict[str, dict]
) -> None:
    ours = found[layout]
    one_rank = found["one"]
    assert torch.equal(ours["values"][0], one_rank["values"][0])
    for our_metrics, expected in zip(ours["metrics"], one_rank["metrics"], strict=True):
        for depth in (1, 2):
            name = f"draft_loss_{depth}"
            assert our_metrics[name] == pytest.approx(expected[name], rel=1e-4)
    moved = (one_rank["values"][-1] - one_rank["values"][0]).norm()
    assert (ours["values"][-1] - one_rank["values"][-1]).norm() < 1e-2 * moved


def test_deferred_gathers_of_parameters_change_nothing(found: dict[str, dict]) -> None:
    """The layer is trained with embeddings and output weights of the whole new policy."""
    one_rank = found["dp2-sharded"]["values"]
    other = found["dp2-overlapping"]["values"]
    for step, (ours, expected) in enumerate(zip(other, one_rank, strict=True)):
        assert (ours - expected).norm() <= 1e-5 * expected.norm(), step


@pytest.mark.parametrize("layout", ["one", "one-shared", "cp2", "ep2"])
def test_the_layer_learns(layout: str, found: dict[str, dict]) -> None:
    ours = found[layout]
    for metrics in ours["metrics"]:
        assert {"draft_loss_1", "draft_loss_2"} <= metrics.keys()
    assert not torch.equal(ours["values"][-1], ours["values"][0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_is_published_with_the_weights(
    layout: str, found: dict[str, dict]
) -> None:
    ours = found[layout]
    drafts = [name for name in ours["names"] if name.startswith("draft.")]
    assert len(drafts) == 9
    assert ours["first"].keys() == ours["names"].keys()
    assert all(ours["first"][name] != ours["names"][name] for name in drafts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loaded_layer_goes_on_bit_for_bit(
    layout: str, found: dict[str, dict]
) -> None:
    ours = found[layout]
    assert torch.equal(ours["loaded"], ours["values"][2])
    assert torch.equal(ours["again"], ours["values"][3])
    assert ours["published again"] == ours["names"]
