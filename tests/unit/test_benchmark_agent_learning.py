"""The comparison of agent and environment goes on where it was cut off."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import agent_learning
import pytest
from quickstart_runs import finished_run

LEDGER = {"difference": 0}


def write_run(folder: Path, name: str, *, steps: int, state: str) -> None:
    rows = [{"step": s, "wall_s": 2.0 * s, "trained_tokens": 10} for s in range(1, steps + 1)]
    rows.append({"evaluation_step": steps, "reward_heldout": 0.5})
    (folder / name).mkdir()
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / name / "summary.json").write_text(json.dumps({"state": state, "ledger": LEDGER}))


def test_only_a_run_with_all_its_steps_is_finished(tmp_path: Path) -> None:
    write_run(tmp_path, "whole", steps=12, state="finished")
    write_run(tmp_path, "stopped", steps=12, state="stopped")
    run = finished_run(tmp_path, "whole")
    assert run is not None
    assert run.wall_s == 24.0
    assert finished_run(tmp_path, "stopped") is None
    assert finished_run(tmp_path, "never begun") is None


def test_a_comparison_that_was_cut_off_runs_only_what_is_missing(tmp_path: Path) -> None:
    started: list[str] = []
    (tmp_path / "model").mkdir()

    def start(folder: Path, name: str, *_: object, **__: object) -> object:
        started.append(name)
        if len(started) == 2:
            raise subprocess.TimeoutExpired(name, 1.0)
        write_run(folder, name, steps=12, state="finished")
        return finished_run(folder, name)

    with pytest.raises(subprocess.TimeoutExpired):
        agent_learning.measure(tmp_path, repeats=1, steps=12, start=start)
    found = agent_learning.measure(tmp_path, repeats=1, steps=12, start=start)
    assert started == ["environment-0", "agent-0", "agent-0", "bare-0"]
    assert [len(runs) for runs in found.values()] == [1, 1, 1]
    assert found["agent"][0] == {
        "heldout": {12: 0.5},
        "last": 0.5,
        "tokens_per_s": 20 / 4.0,
        "wall_s": 24.0,
        "step_cpu_s": None,
        "difference": 0,
    }


def test_a_finished_run_goes_on_when_more_steps_are_asked(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for kind in agent_learning.KINDS:
        write_run(tmp_path, f"{kind}-0", steps=12, state="finished")
    started: list[str] = []

    def start(folder: Path, name: str, *_: object, **__: object) -> object:
        started.append(name)
        return finished_run(folder, name)

    agent_learning.measure(tmp_path, repeats=1, steps=20, start=start)
    assert started == ["environment-0", "agent-0", "bare-0"]
