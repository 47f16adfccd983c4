"""A small run goes on without a controller for a while, beside its engines and its trainer."""

from pathlib import Path

import pytest
from support.rigs.run_processes import (
    CONTROLLER,
    LONG_RUN,
    ROLLOUT_SERVER,
    TRAINER,
    check_replay,
    checked,
    command,
    copy_environments,
    is_alive,
    kill,
    write_config,
)
from support.rigs.steps import until_row

pytestmark = [*LONG_RUN, pytest.mark.timeout(900)]

LIMIT_S = 600.0
STEPS = 4
MEMBERS = 4
GROUPS = 4
SIZES = {
    "evaluations": [],
    "algorithm__group_size": MEMBERS,
    "algorithm__groups_per_step": GROUPS,
    "rollout_server__max_episodes": 64,
}


async def test_a_killed_controller_is_started_again_beside_engines_and_trainer(
    tmp_path: Path, tiny_model: Path
) -> None:
    slow = {
        "name": "slow",
        "reference": "user_environments:Slow",
        "args": {"step_s": 0.3},
    }
    write_config(
        copy_environments(tmp_path),
        tiny_model,
        run__steps=STEPS,
        environments=[slow],
        **SIZES,
    )
    async with command(tmp_path, "run", "config.toml", cwd=tmp_path) as run:
        await until_row(tmp_path, run, 1)
        (controller,) = run.find(CONTROLLER)
        processes = run.find(ROLLOUT_SERVER) + run.engines() + run.find(f"{TRAINER} ")
        kill(controller)
        await until_row(tmp_path, run, 3)
        assert [is_alive(process) for process in processes] == [True] * len(processes)
        assert await run.wait(LIMIT_S) == 0, run.out + run.err
    assert run.err == ""
    (message,) = (line for line in run.out.splitlines() if "! " in line)
    assert "! controller was killed by SIGKILL" in message
    assert message.endswith("; start 2")
    summary = checked(tmp_path / "run")
    assert (summary["state"], summary["steps"], summary["ledger"]["lost"]) == (
        "finished",
        STEPS,
        0,
    )
    check_replay(tmp_path / "run")
