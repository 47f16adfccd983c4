"""The algorithms of deploy/algorithms train the quickstart as files beside its configuration."""

import os
import shutil
from pathlib import Path

import pytest
from slipstream.core.machine.address import free_port
from slipstream.protocol.access.exposure import RENDEZVOUS_VARIABLE
from support.rigs.completed import python
from support.rigs.run_processes import ROOT, check_ledger, succeed, summary_of, write_config
from support.rigs.smallest_run import run_smallest

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


# Replays a run with other functions, which the command refuses.
REPLAY = """
import sys
from pathlib import Path
from slipstream.core.configuration.config_file import load_config
from slipstream.learner.trainer.replay import recorded_steps, replay
run = Path(sys.argv[1])
config = load_config(run / "config.toml", sys.argv[2:]).model_copy(update={"sources": {}})
sys.exit(replay(config, list(recorded_steps(run / "journal"))))
"""


@pytest.mark.slow
def test_a_run_with_grpo_written_down_again_has_the_built_in_ones_bits(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    built_in = {"loss": "ppo", "weight": "token", "advantage": "grpo", "reward": "none"}
    own = [f"algorithm.{kind}=support.fakes.own_grpo:{kind}" for kind in built_in]
    summary, _ = run_smallest(tmp_path, tiny_model, "algorithm.mini_batches=2", *own)
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    names = [f"algorithm.{kind}={name}" for kind, name in built_in.items()]
    replay = python(
        REPLAY,
        str(tmp_path / "smallest"),
        *names,
        env=os.environ | ranks | meeting | {RENDEZVOUS_VARIABLE: "a test"},
    )
    assert replay.returncode == 0, replay.stdout + replay.stderr
    assert replay.stdout.count("as recorded") == summary["steps"]
