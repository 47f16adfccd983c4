from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from lease_policies import figures, goal_s, lines_of
from quickstart_runs import Run, run_quickstart


def run() -> Run:
    rewards = [0.5, 0.8, 0.9, 0.9, 0.95, 0.95, 0.9]
    rows = [
        {"wall_s": 10.0 + 2 * step, "reward_mean": reward, "waiting_s": 0.3}
        for step, reward in enumerate(rewards)
    ]
    ledger = {"generated": 1000, "trained": 700, "evaluated": 100, "cancelled": 150, "lost": 50}
    summary = {"ledger": ledger, "tokens_by_lag": {"0": 100, "2": 300}, "reward_heldout": 0.7}
    return Run(rows, [], summary, 99.0)


def test_figures_leave_out_what_came_before_the_first_step() -> None:
    assert figures(run()) == {
        "wasted_share": 0.2,
        "lag_mean": 1.5,
        "steps_per_min": 30.0,
        "waiting_share": 6 * 0.3 / 12.0,
        "goal_s": 10.0,
        "reward_heldout": 0.7,
    }


def test_a_run_that_never_reached_the_goal_has_no_time_for_it() -> None:
    assert goal_s(run().rows[:5]) is None
    late = {**figures(run()), "goal_s": None}
    lines = lines_of({"eager": [figures(run()), late], "just_in_time": [figures(run())]})
    assert [line.split(" | ")[5] for line in lines[2:]] == ["-", "10.0 (10.0-10.0)"]
    assert lines[2].startswith("| `eager` | 20.0 (20.0-20.0)% | 1.50 (1.50-1.50) | 30.0 ")


@pytest.mark.process
def test_a_run_needs_packages_on_the_path_and_no_installed_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    # Our command ran: it refused the settings.
    with pytest.raises(RuntimeError, match="no_such_setting"):
        run_quickstart(tmp_path, "r", ["run.no_such_setting=1"])
