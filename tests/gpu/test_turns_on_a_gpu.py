"""Whole runs on one GPU in which engine and learner compute in turn."""

import re
from pathlib import Path

import pytest
import torch
from slipstream.learner.trainer.step_cost import PEAK_TFLOPS
from support.fakes.tiny_models import make_model_folder
from support.rigs.run_processes import (
    checked,
    copy_environments,
    rows_of,
    run_command,
    write_config,
)

pytestmark = pytest.mark.timeout(500)
STEPS = 6


@pytest.fixture(autouse=True)
def _tells_what_it_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")


def trained(tmp_path: Path, **settings: object) -> Path:
    """Runs `slipstream run` with `settings`; returns the run's folder."""
    folder = copy_environments(tmp_path)
    write_config(
        folder,
        make_model_folder(tmp_path / "tiny"),
        run__steps=STEPS,
        evaluations=[],
        rollout_server__gpu_memory_utilization=0.5,
        weights__transport="ipc",
        **settings,
    )
    result = run_command("run", "config.toml", cwd=folder, limit_s=450)
    assert result.returncode == 0, result.stdout + result.stderr
    run = folder / "run"
    rows = rows_of(run)
    assert len(rows) == STEPS
    checked(run)
    gaps = [row["logprob_gap_mean"] for row in rows if row["logprob_gap_tokens"]]
    print({"gaps": gaps, "step_s": [row.get("step_s") for row in rows]}, flush=True)
    assert max(gaps) < 5e-3
    if peak := PEAK_TFLOPS.get(torch.cuda.get_device_name()):
        assert rows[-1]["mfu"] == pytest.approx(rows[-1]["tflops_per_rank"] / peak)
    return run


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_an_engine_gives_its_memory_back_in_each_step_and_samples_what_is_trained(
    tmp_path: Path, enforce_eager: bool
) -> None:
    run = trained(
        tmp_path,
        controller__turns="sleep",
        learner__offload={"gradients": True, "optimizer": True},
        rollout_server__enforce_eager=enforce_eager,
    )
    log = (run / "logs" / "server-0.log").read_text()
    freed = [float(gib) for gib in re.findall(r"Sleep mode freed ([0-9.]+) GiB", log)]
    print({"freed_gib": freed}, flush=True)
    # The cache of keys and values is nearly all of what the engine was given.
    total_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    assert len(freed) >= STEPS - 1
    assert min(freed) > 0.4 * total_gib


def test_an_engine_on_the_learners_gpu_pauses_in_each_step_without_being_told(
    tmp_path: Path,
) -> None:
    run = trained(tmp_path, rollout_server__enforce_eager=True)
    log = (run / "logs" / "controller.log").read_text()
    assert "turns: pause, because rollout server server-0 shares a GPU" in log
