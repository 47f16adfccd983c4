"""Logs of a whole run: JSON on every line, of a bounded size."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.rigs.run_processes import (
    checked,
    copy_environments,
    run_command,
    write_config,
)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("nothing_survives")]

STEPS = 4
ECHO = {
    "name": "echo",
    "reference": "slipstream.environments.echo:Echo",
    "args": {"num_symbols": 12, "reply_length": 4, "split": "train"},
}
PROCESSES = ("controller", "server-0", "trainer-rank-0")
MAX_BYTES = 10485


def start(
    folder: Path, model: Path, **changes: Any
) -> subprocess.CompletedProcess[str]:
    copy_environments(folder)
    settings = {
        "run__steps": STEPS,
        "environments": [ECHO],
        "evaluations": [],
        "algorithm__groups_per_step": 4,
        "algorithm__group_size": 4,
        "logging__format": "json",
        "logging__max_mib": 0.01,
    }
    write_config(folder, model, **(settings | changes))
    return run_command("run", "config.toml", cwd=folder, limit_s=500)


def objects_of(text: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in text.splitlines()]
    for entry in entries:
        assert {"time", "level", "process", "run", "message"} <= entry.keys()
        assert entry["run"] == "run"
    return entries


def entries_of(folder: Path, process: str) -> list[dict[str, Any]]:
    """What a process said, the oldest first; no log is larger than the settings allow."""
    logs = sorted(folder.glob(f"logs/{process}.log*"), reverse=True)
    assert all(log.stat().st_size <= MAX_BYTES for log in logs)
    entries = [entry for log in logs for entry in objects_of(log.read_text())]
    assert {entry["process"] for entry in entries} == {process}
    return entries


def test_every_process_of_a_run_writes_objects_with_its_steps(tmp_path, tiny_model):
    run = start(tmp_path, tiny_model)
    assert run.returncode == 0, run.stdout + run.stderr
    assert checked(tmp_path / "run")["steps"] == STEPS
    shown = objects_of(run.stdout)
    assert {entry["process"] for entry in shown} == {"command"}
    assert [entry["step"] for entry in shown if "step" in entry][-1] == STEPS
    steps: dict[str, list[int]] = {}
    for process in PROCESSES:
        entries = entries_of(tmp_path / "run", process)
        assert len(entries) > 3
        steps[process] = [entry["step"] for entry in entries if "step" in entry]
    # Lines printed past the logger have the time at which the log's writer read them, a little
    # later than a record's own: in both processes the steps give the order of the lines.
    for process in ("server-0", "trainer-rank-0"):
        assert steps[process] == sorted(steps[process])
        assert steps[process][-1] == STEPS


def test_a_refusal_of_the_command_is_an_object_too(tmp_path, tiny_model):
    run = start(tmp_path, tiny_model, run__resume="must")
    assert run.returncode == 2
    (refused,) = objects_of(run.stderr)
    assert (refused["level"], refused["process"]) == ("ERROR", "command")
    assert "run.resume" in refused["message"]
