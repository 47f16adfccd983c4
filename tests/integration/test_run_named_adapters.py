"""Two environments train two adapters of one model, on opposite tasks with the same prompts."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from slipstream.core.machine.address import free_port
from support.rigs.run_processes import (
    SLOW_RUN,
    check_replay,
    checked,
    rows_of,
    succeed,
    summary_of,
)

pytestmark = [*SLOW_RUN, pytest.mark.timeout(600)]
CONFIG = Path(__file__).parents[2] / "deploy/configs/two-adapters.toml"


def test_two_adapters_learn_opposite_tasks_and_go_on_and_are_replayed(
    tmp_path, tiny_model
):
    table = tomllib.loads(CONFIG.read_text())
    table["run"] |= {"name": "run", "dir": str(tmp_path), "steps": 40}
    table["model"]["path"] = str(tiny_model)
    table["controller"] = {"address": f"127.0.0.1:{free_port('127.0.0.1')}"}
    table["checkpoint"] = {"every_steps": 30}
    # Loading the second adapter once found the model's memory given away behind the first.
    table["learner"]["offload"] = {
        "parameters": True,
        "gradients": True,
        "optimizer": True,
    }
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(table))
    succeed("run", path, limit_s=400)
    folder = tmp_path / "run"
    final = tmp_path / "run" / "checkpoints" / "final-adapters"
    rows = rows_of(folder)
    for name in ("name-them", "name-others"):
        rewards = [row[f"{name}/reward"] for row in rows if f"{name}/reward" in row]
        first = sum(rewards[:5]) / 5
        last = sum(rewards[-5:]) / 5
        assert last > first + 0.2, (name, first, last)
    assert {f"adapter/{name}/loss" for name in ("echo", "others")} <= rows[-1].keys()
    summary = checked(folder)
    # Learner and engine round differently in bfloat16.
    assert summary["probe_gap_max"] <= 0.05
    assert summary["logprob_gap_mean"] <= 0.02
    echo, other_names = (
        load_file(final / name / "adapter_model.safetensors")
        for name in ("echo", "others")
    )
    assert echo.keys() == other_names.keys()
    assert not any(torch.equal(echo[name], other_names[name]) for name in echo)

    # The checkpoint of the end, and no merged model.
    succeed("export", folder, "--step", "40", cwd=tmp_path, limit_s=100)
    for name in ("echo", "others"):
        exported = folder / "checkpoints" / "hf-000040-adapters" / name
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            assert (exported / file).read_bytes() == (final / name / file).read_bytes()
    assert not (folder / "checkpoints" / "hf-000040").exists()
    assert not (folder / "checkpoints" / "final").exists()

    table["run"]["steps"] = 43
    path.write_text(tomli_w.dumps(table))
    succeed("run", path, limit_s=200)
    assert summary_of(folder)["steps"] == 43
    check_replay(folder)
