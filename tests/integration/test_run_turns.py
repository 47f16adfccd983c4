"""Whole runs in which learner and engine compute in turn; they share the CPU in place of a GPU."""

from pathlib import Path

import pytest
from support.rigs.run_processes import (
    check_ledger,
    copy_environments,
    rows_of,
    succeed,
    summary_of,
    write_config,
)

pytestmark = pytest.mark.usefixtures("nothing_survives")

SETTINGS = {
    "controller__turns": "sleep",
    "learner__offload": {"gradients": True, "optimizer": True},
    "algorithm__group_size": 4,
    "algorithm__groups_per_step": 4,
    "algorithm__max_staleness": 2,
    "evaluations": [],
}


@pytest.mark.slow
def test_a_run_in_turns_trains_what_its_engine_sampled(tmp_path: Path, tiny_model: Path) -> None:
    folder = copy_environments(tmp_path)
    write_config(folder, tiny_model, run__steps=5, **SETTINGS)
    result = succeed("run", "config.toml", cwd=folder, limit_s=400)
    told = result.stdout
    # The learner has given its memory back before the engine starts.
    assert told.index("the trainer has") < told.index("rollout server server-0 joined")
    run = folder / "run"
    rows = rows_of(run)
    assert len(rows) == 5
    check_ledger(summary_of(run))
    # Versions and log-probabilities are right across all rests: both compute in float32.
    assert max(row["logprob_gap_max"] for row in rows if "logprob_gap_max" in row) < 1e-2
    log = (run / "logs" / "server-0.log").read_text()
    # vLLM on CPUs says so at each order, and keeps its memory.
    assert "sleep mode is not supported on CPU" in log
