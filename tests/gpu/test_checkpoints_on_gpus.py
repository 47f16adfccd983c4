"""Checkpoints of ranks with a GPU each: copied to pinned memory, gathered from device to device."""

import json
import os
from pathlib import Path

import pytest
import torch
from support.ranks import checkpoint_ranks
from support.ranks.rank_pool import RankPool

# Rehearses everything without a GPU: on gloo, and in float32.
REHEARSAL = "SLIPSTREAM_REHEARSAL" in os.environ

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not torch.cuda.is_available() and not REHEARSAL, reason="no GPU"
    ),
]
LAYOUTS = {
    "plain": {},
    "distributed": {"ddp": {"use_distributed_optimizer": True}},
    "distributed-2": {"world_size": 2, "ddp": {"use_distributed_optimizer": True}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoint_ranks.make_models(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_holds_every_bit(
    layout: str, dtype: str, folder: Path, rank_pool: RankPool
) -> None:
    learner = LAYOUTS[layout]
    world_size = int(learner.get("world_size", 1))
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"fewer than {world_size} GPUs")
    name = f"{layout}-{dtype}"
    job = {"run": name, "learner": learner, "dtype": dtype, "until": 3}
    jobs = {
        name: {**job, "save": [2]},
        f"{name}-again": {**job, "resume": True, "late": True},
    }
    for its, table in jobs.items():
        (folder / f"{its}.json").write_text(json.dumps(table))
        program = Path(checkpoint_ranks.__file__)
        rank_pool.run(program, [its], world_size=world_size, folder=folder)
    saved, again = (
        torch.load(folder / f"{job}.pt", weights_only=True, map_location="cpu")
        for job in jobs
    )
    assert again["error"] == ""
    assert again["loaded"] == 2
    # Digests of the loaded weights, and of a save during whose writing training continued.
    assert again["digest"] == again["loaded_digest"] == again["late_digest"]
    assert again["loaded_optimizer"].keys() == saved["saved_optimizer"].keys()
    for key, value in saved["saved_optimizer"].items():
        assert torch.equal(again["loaded_optimizer"][key], value), key
    # Kernels that add up in any order leave the last bits open.
    for key in ("loss", "grad_norm", "entropy"):
        near = pytest.approx(saved["metrics"][2][key], rel=1e-2, abs=1e-3)
        assert again["metrics"][0][key] == near, key


@pytest.mark.parametrize(
    "parallel", [{"tp": 2, "pp": 2}, {"tp": 2, "cp": 2}, {}], ids=str
)
def test_a_checkpoint_of_four_gpus_goes_on_on_one_and_on_two(
    parallel: dict, folder: Path, rank_pool: RankPool
) -> None:
    if torch.cuda.device_count() < 4 and not REHEARSAL:
        pytest.skip("fewer than 4 GPUs")
    distributed = {"ddp": {"use_distributed_optimizer": True}}
    name = f"four-{'-'.join(parallel)}"
    layouts = {
        name: {"world_size": 4, "parallel": parallel},
        f"{name}-one": {},
        f"{name}-two": {"world_size": 2, "parallel": {"tp": 2}},
    }
    weights = {}
    for its, layout in layouts.items():
        job = {"run": name, "learner": layout | distributed, "until": 3}
        job |= {"dtype": "float32" if REHEARSAL else "bfloat16"}
        job |= {"save": [2]} if its == name else {"resume": True}
        (folder / f"{its}.json").write_text(json.dumps(job))
        program = Path(checkpoint_ranks.__file__)
        rank_pool.run(
            program, [its], world_size=layout.get("world_size", 1), folder=folder
        )
        weights[its] = torch.load(
            folder / f"{its}.pt", weights_only=True, map_location="cpu"
        )
    saved = weights.pop(name)
    for its, again in weights.items():
        assert (again["error"], again["loaded"]) == ("", 2), its
        # The digest of the saved weights is in the manifest.
        assert again["digest"] == again["loaded_digest"], its
        for key in ("loss", "grad_norm", "entropy"):
            near = pytest.approx(saved["metrics"][2][key], rel=1e-2, abs=1e-3)
            assert again["metrics"][0][key] == near, (its, key)
