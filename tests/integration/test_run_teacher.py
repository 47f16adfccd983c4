"""The policy is its own teacher, which reads more: a run, its check, a resume and a replay."""

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
