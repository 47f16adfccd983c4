"""The algorithms of deploy/algorithms train the quickstart as files beside its configuration."""

import shutil
from pathlib import Path

import pytest
from support.rigs.run_processes import ROOT, check_ledger, succeed, summary_of, write_config

pytestmark = pytest.mark.usefixtures("nothing_survives")

# The settings of docs/guides/own-algorithms.md.
SETTINGS: dict[str, dict[str, object]] = {
    "gmpo": {
        "algorithm__loss": "gmpo:loss",
        "algorithm__aggregation": "sequence_mean",
        "algorithm__mini_batches": 4,
    },
    "dppo": {
        "algorithm__weight": "dppo:weight",
        "algorithm__loss": "reinforce",
        "algorithm__mini_batches": 4,
    },
    "maxrl": {"algorithm__advantage": "maxrl:advantage"},
    "gigpo": {"algorithm__advantage": "gigpo:advantage"},
    "alp": {"algorithm__reward": "alp:reward", "sampling__max_reply_tokens": 8},
    # Later the task is solved so often that the filter leaves out too many groups.
    "difficulty": {
        "run__steps": 100,
        "algorithm__filter": "difficulty:filter",
        "algorithm__filter_args": {"low": 0.02, "high": 0.98},
    },
}


def copy_algorithms(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in SETTINGS:
        shutil.copy(ROOT / "deploy" / "algorithms" / f"{name}.py", folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SETTINGS)
def test_it_learns_and_its_run_can_be_replayed(name: str, tmp_path: Path, tiny_model: Path) -> None:
    copy_algorithms(tmp_path)
    write_config(tmp_path, tiny_model, **SETTINGS[name])
    succeed("run", "config.toml", cwd=tmp_path, limit_s=600)
    summary = summary_of(tmp_path / "run")
    check_ledger(summary)
    assert summary["reward_last"] >= summary["reward_first"] + 0.4
    replay = succeed("replay", tmp_path / "run", cwd=tmp_path, limit_s=400)
    assert len(replay.stdout.splitlines()) == summary["steps"]
