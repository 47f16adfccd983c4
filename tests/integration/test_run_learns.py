"""The quickstart as it is shipped: it learns, and with shuffled rewards it does not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from run_processes import check_ledger, run_command, summary_of, write_config  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(700),
    pytest.mark.usefixtures("nothing_survives"),
]


def run_quickstart(folder: Path, model: Path, **changes: object) -> dict:
    write_config(folder, model, **changes)
    result = run_command("run", "config.toml", cwd=folder, limit_s=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    summary = summary_of(folder / "run")
    check_ledger(summary)
    return summary


def test_the_quickstart_learns(tmp_path: Path, tiny_model: Path) -> None:
    started = time.monotonic()
    summary = run_quickstart(tmp_path, tiny_model)
    assert time.monotonic() - started <= 300
    assert summary["reward_last"] >= 0.8
    assert summary["reward_last"] >= summary["reward_first"] + 0.4
    assert abs(summary["reward_heldout"] - summary["reward_last"]) <= 0.1
    assert 0 < summary["max_lag_seen"] <= summary["max_staleness"] == 2
    assert summary["trajectories_with_several_versions"] > 0
    assert summary["logprob_gap_mean"] <= 1e-4
    assert summary["probe_gap_max"] <= 1e-3


def test_shuffled_rewards_teach_nothing(tmp_path: Path, tiny_model: Path) -> None:
    summary = run_quickstart(tmp_path, tiny_model, algorithm__shuffle_rewards=True)
    assert abs(summary["reward_last"] - summary["reward_first"]) <= 0.25
