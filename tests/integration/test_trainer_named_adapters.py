"""Several adapters in one run are trained as in runs of one each, and saved and loaded as such."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from support.ranks.lora_ranks import save
from support.ranks.parity_layouts import OVERLAP, STEPS, batches
from support.ranks.rank_pool import RankPool
from support.ranks.rank_program import kept, opened, settings_of

if TYPE_CHECKING:
    from slipstream.learner.trainer.model.policy import Policy

# "idle" has no sequences at all, "code" none in the second step.
NAMES = ("code", "idle", "math")
ALL = "all"
ALL_AWAY = dict.fromkeys(("parameters", "gradients", "optimizer"), True)
TP2 = {"parallel": {"tp": 2}, "transformer": {"sequence_parallel": False}}
# name -> (ranks, model, changes of sections)
LAYOUTS: dict[str, tuple[int, str, dict[str, dict]]] = {
    "one-mini-batches": (1, "llama", {"algorithm": {"mini_batches": 2, "epochs": 2}}),
    # Every adapter has a scale of the loss of its own, which grows after each of its updates.
    "one-float16": (
        1,
        "llama",
        {
            "model": {"dtype": "float16"},
            "learner": {"optimizer": {"adam_eps": 1e-3, "loss_scale_window": 1}},
        },
    ),
    "one-offload": (1, "llama", {"learner": {"offload": ALL_AWAY}}),
    "tp2": (2, "llama", {"learner": TP2}),
    "pp2": (2, "llama", {"learner": {"parallel": {"pp": 2}}}),
    "dp2-distributed-bfloat16": (
        2,
        "llama",
        {"learner": OVERLAP, "model": {"dtype": "bfloat16"}},
    ),
    "ep2-experts": (2, "moe", {"learner": {"parallel": {"ep": 2}}}),
}
# Layouts that others show too, so that it need not be tried at every change.
SLOW = {"one-mini-batches", "pp2"}


def sizes_of(layouts: Iterable[str]) -> dict[str, int]:
    """The jobs of some layouts, with their numbers of ranks."""
    jobs = itertools.product(layouts, (ALL, "code", "math"))
    return {f"{layout} {name}": LAYOUTS[layout][0] for layout, name in jobs}


def config_of(job: str, folder: Path) -> Config:
    layout, adapter = job.split()
    world_size, model, changes = LAYOUTS[layout]
    settings = {
        "learner": {
            "world_size": world_size,
            "grad_clip": 0.05,
            "micro_batch_tokens": 400,
        },
        # Two groups for each adapter, of which one has unequal rewards.
        "algorithm": {"groups_per_step": 4},
        "lora": {"rank": 4, "alpha": 8.0},
    }
    lora_settings = (
        {"adapters": list(NAMES), "publish": "adapters"} if adapter == ALL else {}
    )
    return settings_of(folder / model, settings, changes, {"lora": lora_settings})


def named_batches(config: Config) -> list[Batch]:
    """The batches of all adapters: groups in turn, and in the second step those of "math" only."""
    found = []
    for batch in batches(config):
        groups = list(dict.fromkeys(batch.group_ids))
        name_of = {
            group: "math" if batch.step == 1 or place % 2 == 0 else "code"
            for place, group in enumerate(groups)
        }
        trajectories = (
            dataclasses.replace(t, adapter=name_of[t.group_id])
            for t in batch.trajectories
        )
        found.append(dataclasses.replace(batch, trajectories=tuple(trajectories)))
    return found


def batches_of(job: str, config: Config) -> list[Batch]:
    """The batches of a job; without other adapters trajectories name none."""
    adapter = job.split()[1]
    batches = named_batches(config)
    if adapter == ALL:
        return batches
    parts = [dict(batch.by_adapter(NAMES)).get(adapter) for batch in batches]
    return [
        dataclasses.replace(
            part,
            trajectories=tuple(
                dataclasses.replace(t, adapter="") for t in part.trajectories
            ),
        )
        for part in parts
        if part is not None
    ]


def adapters_of(policy: Policy) -> dict[str, dict[str, torch.Tensor]]:
    from slipstream.learner.trainer.weights.export import adapter_tensors

    found = {}
    for name in policy.adapters.names:
        with policy.adapters.active(name):
            found[name] = {
                n: t.clone() for n, t in adapter_tensors(policy, torch.float32)
            }
    return found


def run_rank(folder: Path, job: str) -> None:
    """A rank's part of a job, "LAYOUT all" or "LAYOUT NAME": a run with that adapter only."""
    from slipstream.learner.trainer.checkpoints.disk_work import DiskWork
    from slipstream.learner.trainer.checkpoints.distributed_files import load_models
    from slipstream.learner.trainer.checkpoints.stored_model import stored_policy
    from slipstream.learner.trainer.model.model import MemoryPart
    from slipstream.learner.trainer.step import TrainingStep

    config = config_of(job, folder)
    policy = opened(config)
    with policy.memory.resident(*MemoryPart):
        pass
    step = TrainingStep(policy, config)
    stored = stored_policy(policy)
    disk = DiskWork(folder, policy.ranks)
    before = adapters_of(policy)
    steps: dict[int, dict] = {}
    metrics = {}
    planned = batches_of(job, config)
    path = folder / f"named-{job.replace(' ', '-')}-checkpoint"
    for batch in planned:
        if batch is planned[-1]:
            with policy.memory.resident(MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER):
                save(stored, path, disk)
        metrics[batch.step] = step.run(batch).metrics
        steps[batch.step] = adapters_of(policy)
    with policy.memory.resident(MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER):
        load_models(stored, path, disk)
    loaded = adapters_of(policy)
    step.run(planned[-1])
    result = {
        "before": before,
        "steps": steps,
        "metrics": metrics,
        "loaded": loaded,
        "retrained": adapters_of(policy),
    }
    kept(policy, result, folder / f"{job}.pt")


NUM_LAYERS = 2
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


for_layouts = pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS],
)


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, folder: Path, rank_pool: RankPool
) -> dict[str, dict]:
    """What the jobs of the layouts saw whose tests are run."""
    items = (item for item in request.session.items if item.path == request.path)
    expected = sorted({item.callspec.params["layout"] for item in items})
    return rank_pool.found(__file__, sizes_of(expected), folder)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[n], theirs[n]) for n in ours
    )


@pytest.mark.parametrize("name", ["code", "math"])
@for_layouts
def test_each_adapter_is_trained_bit_for_bit_as_in_a_run_of_its_own(
    layout, name, found
):
    ours = found[f"{layout} {ALL}"]
    alone = found[f"{layout} {name}"]
    assert same(ours["before"][name], alone["before"][""])
    for step, adapters in alone["steps"].items():
        assert same(ours["steps"][step][name], adapters[""]), step
        for key in ("loss", "grad_norm", "entropy", "kl", "trained_tokens"):
            assert (
                ours["metrics"][step][f"adapter/{name}/{key}"]
                == alone["metrics"][step][key]
            )
    assert not same(ours["steps"][0][name], ours["before"][name])


@for_layouts
def test_an_adapter_without_sequences_is_not_changed_by_a_step(
    layout: str, found: dict[str, dict]
):
    ours = found[f"{layout} {ALL}"]
    # The adapter has momentum from the first step, and weights decay.
    assert same(ours["steps"][1]["code"], ours["steps"][0]["code"])
    assert not any(key.startswith("adapter/code/") for key in ours["metrics"][1])
    for step in range(STEPS):
        assert same(ours["steps"][step]["idle"], ours["before"]["idle"])


@for_layouts
def test_gradients_of_an_adapter_are_clipped_by_its_own_norm(
    layout: str, found: dict[str, dict]
):
    metrics = found[f"{layout} {ALL}"]["metrics"][0]
    norms = [metrics[f"adapter/{name}/grad_norm"] for name in ("code", "math")]
    # Both are cut: by the norm of all gradients together each would differ from its own run.
    assert min(norms) > 0.05
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 2)


@for_layouts
def test_adapters_go_on_from_a_checkpoint_bit_for_bit(
    layout: str, found: dict[str, dict]
) -> None:
    ours = found[f"{layout} {ALL}"]
    for name in NAMES:
        assert same(ours["loaded"][name], ours["steps"][STEPS - 2][name])
        assert same(ours["retrained"][name], ours["steps"][STEPS - 1][name])
    assert not same(ours["loaded"]["code"], ours["loaded"]["math"])
