"""The smallest configuration there is runs on this machine, on CPUs or on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from run_processes import ROOT, check_ledger, run_command, summary_of  # noqa: E402
from slipstream.client.preflight import free_port  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_survives")

SMALLEST = ROOT / "deploy" / "configs" / "smallest.toml"


def test_the_smallest_configuration_runs_with_every_default(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A user's shell does not set it; `make test` does.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    # What has no default on any machine: where the model lies, where runs lie, a port of its own.
    own = [
        f"model.path={tiny_model}",
        f"run.dir={tmp_path}",
        f"controller.address=127.0.0.1:{free_port('127.0.0.1')}",
    ]
    run = run_command("run", SMALLEST, *own, cwd=ROOT, limit_s=500)
    assert run.returncode == 0, run.stdout + run.stderr
    summary = summary_of(tmp_path / "smallest")
    assert (summary["state"], summary["steps"]) == ("finished", 3)
    check_ledger(summary)


def test_graphs_that_cannot_be_compiled_are_refused_before_anything_starts(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    own = [f"model.path={tiny_model}", f"run.dir={tmp_path}", f"controller.address={address}"]
    run = run_command("run", SMALLEST, *own, "rollout_server.enforce_eager=false", cwd=ROOT)
    assert run.returncode == 2
    assert "TORCHDYNAMO_DISABLE=1 switches that off" in run.stderr
    assert os.listdir(tmp_path) == []
