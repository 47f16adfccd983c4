"""Layouts of two and four GPUs: losses like one GPU's, and rollouts that follow their weights."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.fakes.tiny_models import make_mixture_like, make_model_folder
from support.ranks.rank_pool import RankPool
from support.rigs import parity_run
from support.rigs.gpu_records import note
from support.rigs.run_processes import (
    checked,
    copy_environments,
    rows_of,
    run_with_logs,
    write_config,
)

# Rehearses everything without a GPU: on gloo, and in float32.
REHEARSAL = "SLIPSTREAM_REHEARSAL" in os.environ
DTYPE = "float32" if REHEARSAL else "bfloat16"

pytestmark = [
    pytest.mark.timeout(420),
    pytest.mark.skipif(
        torch.cuda.device_count() < 4 and not REHEARSAL, reason="fewer than 4 GPUs"
    ),
]


@dataclass(frozen=True)
class Layout:
    """Sizes of the learner and its GPUs; the rollout server's GPU; how the weights travel."""

    parallel: dict
    learner: tuple[int, ...]
    server: int
    transport: str
    # The layout of `parity_layouts` whose losses are compared.
    parity: str = ""
    is_mixture: bool = False


ALL = (0, 1, 2, 3)
SP = {"tp": 2}
# NCCL joins no two ranks on one GPU, and ipc takes weights from one rank: where the learner has all
# GPUs they go over gloo.
LAYOUTS = {
    "tp2-pp2": Layout({"tp": 2, "pp": 2}, ALL, 0, "gloo", "tp2-pp2-tied"),
    "tp2-cp2": Layout({"tp": 2, "cp": 2}, ALL, 1, "gloo", "tp2-cp2"),
    "ep2-tp2": Layout(
        SP | {"ep": 2}, ALL, 2, "gloo", "tp2-sp-ep2-moe", is_mixture=True
    ),
    "dp4": Layout({}, ALL, 3, "gloo", "dp4"),
    "tp2": Layout(SP, (0, 1), 2, "nccl"),
    "pp2": Layout({"pp": 2}, (2, 3), 0, "nccl"),
    "cp2": Layout({"cp": 2}, (1, 2), 3, "nccl"),
    "ep2": Layout({"ep": 2}, (3, 0), 1, "nccl", is_mixture=True),
}
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "four-heads"
    return make_model_folder(folder, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def mixture(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture_like(model, tmp_path_factory.mktemp("models") / "four-experts")


def test_losses_of_four_ranks_are_those_of_one(
    rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = [layout.parity for layout in LAYOUTS.values() if layout.parity]
    folder = tmp_path_factory.mktemp("parity")
    comparison = parity_run.compare(rank_pool, folder, 4, DTYPE, names)
    for name, difference in comparison.items():
        note("five-dimensions", layout=name, difference=difference)
    assert sorted(comparison) == sorted(names)
    tolerance = parity_run.TOLERANCES[DTYPE]
    assert {n: d for n, d in comparison.items() if d > tolerance} == {}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rollouts_follow_the_weights(
    name: str, tmp_path: Path, model: Path, mixture: Path
) -> None:
    layout = LAYOUTS[name]
    changes = {}
    if not REHEARSAL:
        changes = {
            "learner__devices": list(layout.learner),
            "rollout_server__devices": [layout.server],
            # Several of these runs may share the GPUs.
            "rollout_server__gpu_memory_utilization": 0.15,
        }
    write_config(
        copy_environments(tmp_path),
        mixture if layout.is_mixture else model,
        run__steps=STEPS,
        model__dtype=DTYPE,
        evaluations=[],
        algorithm__group_size=8,
        algorithm__groups_per_step=8,
        algorithm__max_staleness=0,
        learner__world_size=len(layout.learner),
        learner__parallel=layout.parallel,
        learner__export_final=False,
        rollout_server__enforce_eager=True,
        weights__transport="gloo" if REHEARSAL else layout.transport,
        weights__verify_every=1,
        weights__join_deadline_s=60.0,
        **changes,
    )
    run_with_logs(tmp_path, limit_s=300)
    summary = checked(tmp_path / "run")
    gaps = [
        row["logprob_gap_mean"]
        for row in rows_of(tmp_path / "run")
        if "logprob_gap_mean" in row
    ]
    names = ("steps", "publishes", "publishes_verified", "probe_gap_max")
    facts = {key: summary[key] for key in names}
    note("five-dimensions", layout=name, gaps=gaps, **facts)
    assert summary["steps"] == STEPS
    # The first weights, and those of every step.
    assert summary["publishes_verified"] == summary["publishes"] == STEPS + 1
    limit = 1e-4 if REHEARSAL else 0.05
    assert summary["probe_gap_max"] <= limit
    # All tokens have lag 0: each was sampled by the weights that the learner then had.
    assert max(gaps) <= limit
