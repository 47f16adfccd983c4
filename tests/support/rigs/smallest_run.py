"""Whole runs of the smallest configuration, from their start to their end."""

import os
from pathlib import Path

import pytest
from slipstream.core.machine.address import free_port

from support.fakes import plain_engine_hook
from support.rigs.run_processes import ROOT, checked, rows_of, run_command

SMALLEST = ROOT / "deploy" / "configs" / "smallest.toml"


@pytest.fixture
def plain_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that the test starts have vLLM's plain engine, see `plain_engine_hook`."""
    hook = plain_engine_hook.install(tmp_path / "hook")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(hook), os.getenv("PYTHONPATH", "")])
    )


# Settings of a run that is over soon.
SHORT = (
    "run.name=smallest",
    "algorithm.group_size=4",
    "algorithm.groups_per_step=2",
    "algorithm.learning_rate=1e-4",
    "sampling.max_reply_tokens=8",
    "sampling.max_episode_tokens=64",
)


def own_settings(folder: Path, model: Path) -> list[str]:
    """What is this machine's own: where the model and the runs lie, and a free port."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    return [f"model.path={model}", f"run.dir={folder}", f"controller.address={address}"]


def run_smallest(folder: Path, model: Path, *settings: str) -> tuple[dict, list[dict]]:
    """The summary and the rows of a run, which has succeeded and lost no token."""
    arguments = (*own_settings(folder, model), *SHORT)
    run = run_command("run", SMALLEST, *arguments, *settings, limit_s=500)
    assert run.returncode == 0, run.stdout + run.stderr
    summary = checked(folder / "smallest")
    return summary, rows_of(folder / "smallest")
