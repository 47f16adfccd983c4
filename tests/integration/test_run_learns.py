"""The quickstart learns, by other algorithms too."""

import re
import statistics
from pathlib import Path

import pytest
from slipstream.core.machine.address import free_port
from support.references.documented_metrics import tables
from support.rigs import run_processes

pytestmark = [*run_processes.SLOW_RUN, pytest.mark.timeout(700)]


def run_quickstart(folder: Path, model: Path, **changes: object) -> dict:
    run_processes.write_config(folder, model, **changes)
    result = run_processes.succeed("run", "config.toml", cwd=folder, limit_s=600)
    assert result.stderr == ""
    return run_processes.checked(folder / "run")


def test_the_quickstart_makes_its_model_and_learns(tmp_path: Path) -> None:
    address = f"controller.address=127.0.0.1:{free_port('127.0.0.1')}"
    result = run_processes.run_command("quickstart", address, cwd=tmp_path, limit_s=600)
    assert (result.returncode, result.stderr) == (0, "")
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"tiny"}
    heads = r"\n  held out  at version 0 +at version 150 +asked for\n"
    # A prompt of two letters, two replies, and both letters twice.
    row = r"  ([a-l]) ([a-l]) {7}\S.* {2}\1 \2 \1 \2\n"
    assert re.search(heads, result.stdout)
    assert len(re.findall(row, result.stdout)) == 3
    summary = run_processes.checked(tmp_path / "runs" / "quickstart")
    assert summary["reward_last"] >= 0.8
    assert summary["reward_last"] >= summary["reward_first"] + 0.4
    assert abs(summary["reward_heldout"] - summary["reward_last"]) <= 0.1
    assert 0 < summary["max_lag_seen"] <= summary["max_staleness"] == 2
    assert summary["trajectories_with_several_versions"] > 0
    assert summary["logprob_gap_mean"] <= 1e-4
    assert summary["probe_gap_max"] <= 1e-3


def steps_of(run: Path) -> list[dict]:
    return [row for row in run_processes.rows_of(run) if "step" in row]


def test_ppo_with_a_critic_learns(tmp_path: Path, tiny_model: Path) -> None:
    critic = {"learning_rate": 1e-3, "warmup_steps": 2}
    summary = run_quickstart(
        tmp_path, tiny_model, algorithm__advantage="gae", critic=critic
    )
    assert summary["reward_last"] >= 0.8
    assert summary["reward_last"] >= summary["reward_first"] + 0.4
    rows = steps_of(tmp_path / "run")
    assert [row["learning_rate"] for row in rows[:3]] == [0.0, 0.0, 1e-3]
    # Nearly equal returns leave nothing to explain, and give a step a value without a lower bound:
    # how many such steps end a run depends on how soon it has learned.
    explained = [
        row["explained_variance"] for row in rows[20:] if row["reward_std"] > 0.1
    ]
    assert statistics.median(explained) > 0.2
    (names,) = (
        table for table in tables("A step in metrics.jsonl") if "value_loss" in table
    )
    documented = {name for name in names if name.startswith(("value_", "critic_"))}
    # A run in float16 alone has that one.
    assert documented - set(rows[0]) == {"critic_gradient_overflows"}
    run_processes.check_replay(tmp_path / "run")


def test_grpo_with_a_penalty_on_the_divergence_learns_and_stays_near_the_reference(
    tmp_path: Path, tiny_model: Path
) -> None:
    summary = run_quickstart(
        tmp_path,
        tiny_model,
        algorithm__kl={"coefficient": 0.02},
        reference={"refresh_every_steps": 20},
    )
    assert summary["reward_last"] >= 0.8
    divergence = {
        row["step"]: row["kl_reference"] for row in steps_of(tmp_path / "run")
    }
    # Every refresh makes the policy its own reference again.
    for step in range(1, 150, 20):
        assert divergence[step] == pytest.approx(0.0, abs=1e-6)
        assert divergence[step + 9] > 1e-5
    run_processes.check_replay(tmp_path / "run")
