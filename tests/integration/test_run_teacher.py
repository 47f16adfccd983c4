"""The policy is its own teacher, which reads more: a run, its check, a resume and a replay."""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from support.rigs.run_processes import (
    LONG_RUN,
    check_replay,
    checked,
    rows_of,
    run_command,
    succeed,
    write_config,
)

pytestmark = [*LONG_RUN, pytest.mark.timeout(900)]

ENVIRONMENT = """
from slipstream.client.environment import Environment, Message, ResetResult, StepResult

class Hinted(Environment[str]):
    def tasks(self) -> list[str]:
        return list("abcdefgh")

    def reset(self, task: str) -> ResetResult:
        self.right_reply = task
        teacher_messages = [Message("user", f"{task} {task} b")]
        return ResetResult([Message("user", task)], teacher_messages=teacher_messages)

    def step(self, reply: str) -> StepResult:
        return StepResult(float(self.right_reply in reply))
"""


def test_a_run_comes_nearer_to_what_its_policy_says_with_a_hint(
    tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "hinted.py").write_text(ENVIRONMENT)
    tables = {
        "environments": [{"reference": "hinted:Hinted", "timeout_s": 10.0}],
        "evaluations": [],
        "algorithm__advantage": "none",
        "algorithm__kl": {"coefficient": 1.0, "estimator": "forward_top_k"},
        "algorithm__learning_rate": 1e-3,
        "reference": {"policy": True, "top_k": 8},
    }
    write_config(tmp_path, tiny_model, run__steps=12, **tables)
    succeed("run", "config.toml", cwd=tmp_path, limit_s=400)
    succeed("run", "config.toml", "run.steps=20", cwd=tmp_path, limit_s=400)
    run_folder = tmp_path / "run"
    summary = checked(run_folder)
    assert (summary["state"], summary["steps"]) == ("finished", 20)
    losses = [row["loss"] for row in rows_of(run_folder)]
    assert losses[0] > 0.0
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    check_replay(run_folder, cwd=tmp_path)


def test_environments_with_teachers_of_their_own_come_nearer_to_each(
    tmp_path: Path, tiny_model: Path
) -> None:
    """One reads a hint, one is a model, and a third environment has the model of the start."""
    (tmp_path / "hinted.py").write_text(ENVIRONMENT)
    other_model = tmp_path / "teacher"
    make_model = [sys.executable, "-m", "slipstream.learner.trainer.tiny_model"]
    subprocess.run([*make_model, other_model, "--seed", "5"], check=True)
    names = ("hinted", "taught", "plain")
    tables = {
        "environments": [
            {"reference": "hinted:Hinted", "name": name, "timeout_s": 10.0}
            for name in names
        ],
        "evaluations": [],
        "algorithm__advantage": "none",
        "algorithm__kl": {"coefficient": 1.0, "estimator": "forward_top_k"},
        "algorithm__learning_rate": 1e-3,
        "reference": {
            "top_k": 8,
            "teachers": {
                "itself": {"environments": ["hinted"], "policy": True},
                "other": {"environments": ["taught"], "path": str(other_model)},
            },
        },
    }
    write_config(tmp_path, tiny_model, run__steps=12, **tables)
    succeed("run", "config.toml", cwd=tmp_path, limit_s=400)
    succeed("run", "config.toml", "run.steps=20", cwd=tmp_path, limit_s=400)
    run_folder = tmp_path / "run"
    summary = checked(run_folder)
    assert (summary["state"], summary["steps"]) == ("finished", 20)
    rows = rows_of(run_folder)
    divergences = [row["teacher/other/kl_reference"] for row in rows]
    assert statistics.mean(divergences[-3:]) < 0.7 * divergences[0]
    assert all("teacher/itself/kl_reference" in row for row in rows)
    losses = [row["loss"] for row in rows]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    check_replay(run_folder, cwd=tmp_path)


def test_messages_for_a_teacher_that_is_not_there_end_a_run_with_the_cause(
    tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "hinted.py").write_text(ENVIRONMENT)
    environments = [{"reference": "hinted:Hinted", "timeout_s": 10.0}]
    write_config(tmp_path, tiny_model, environments=environments, evaluations=[])
    failed = run_command("run", "config.toml", cwd=tmp_path, limit_s=400)
    assert failed.returncode != 0
    assert (
        "a run has with algorithm.kl.coefficient > 0" in failed.stdout + failed.stderr
    )
