"""The smallest configuration there is runs on this machine, on CPUs or on a GPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from slipstream.client.launch.placement import uses_gpus  # noqa: E402
from support.rigs.run_processes import run_command  # noqa: E402
from support.rigs.smallest_run import SMALLEST, own_settings, run_smallest  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_survives")


def check_run(folder: Path, model: Path, *changes: str) -> dict:
    summary, _ = run_smallest(folder, model, *changes)
    assert (summary["state"], summary["steps"]) == ("finished", 3)
    return summary


# Agents of every kind train with the same settings in test_run_agents.py.
@pytest.mark.slow
def test_the_smallest_configuration_runs_with_every_default(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A user's shell does not set it; `make test` does.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    check_run(tmp_path, tiny_model)


@pytest.mark.slow
@pytest.mark.skipif(uses_gpus(), reason="GPUs compile by default")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_an_engine_on_a_cpu_compiles_where_it_is_asked_for(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    compiled = ("rollout_server.enforce_eager=false", "model.dtype=float32")
    # A probe of every publish: what was compiled computes with the new weights.
    summary = check_run(tmp_path, tiny_model, *compiled, "weights.verify_every=1")
    assert summary["logprob_gap_max"] < 1e-4


def test_graphs_that_cannot_be_compiled_are_refused_before_anything_starts(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    own = own_settings(tmp_path, tiny_model)
    run = run_command("run", SMALLEST, *own, "rollout_server.enforce_eager=false")
    assert run.returncode == 2
    assert "TORCHDYNAMO_DISABLE=1 switches that off" in run.stderr
    assert os.listdir(tmp_path) == []
