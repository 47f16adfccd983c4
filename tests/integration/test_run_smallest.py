"""The smallest configuration there is runs on this machine, on CPUs or on a GPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from slipstream.client.launch.placement import uses_gpus  # noqa: E402
from slipstream.client.launch.preflight import free_port  # noqa: E402
from support.rigs.run_processes import ROOT, check_ledger, run_command, summary_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_survives")

SMALLEST = ROOT / "deploy" / "configs" / "smallest.toml"


def own_settings(folder: Path, model: Path) -> list[str]:
    """What is this machine's own: where the model and the runs lie, and a free port."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    return [f"model.path={model}", f"run.dir={folder}", f"controller.address={address}"]


def check_run(folder: Path, model: Path, *changes: str) -> dict:
    run = run_command("run", SMALLEST, *own_settings(folder, model), *changes, limit_s=500)
    assert run.returncode == 0, run.stdout + run.stderr
    summary = summary_of(folder / "smallest")
    assert (summary["state"], summary["steps"]) == ("finished", 3)
    check_ledger(summary)
    return summary


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
