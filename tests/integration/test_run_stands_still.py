"""A small run whose controller, and then its trainer, stand still for longer than their deadlines.

Engine, trainer and controller are the real ones.
"""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.learner.trainer.controller_client import CALL_TIMEOUT_S
from support.fakes.impatient_command import SILENT_LIMIT_S
from support.rigs import chaos
from support.rigs.forked_programs import Forks
from support.rigs.run_processes import (
    CONTROLLER,
    LONG_RUN,
    ROLLOUT_SERVER,
    START_LIMIT_S,
    TRAINER,
    check_replay,
    checked,
    command,
    copy_environments,
    is_alive,
    until_gone,
    write_config,
)
from support.rigs.steps import until_row

pytestmark = [*LONG_RUN, pytest.mark.timeout(900)]

LIMIT_S = 600.0
STEPS = 12
SIZES = {
    "evaluations": [],
    "algorithm__group_size": 4,
    "algorithm__groups_per_step": 4,
    "rollout_server__max_episodes": 64,
}


@pytest.fixture
def impatient() -> Iterator[Forks]:
    forks = Forks(
        "slipstream.client.launch.launcher",
        "support.fakes.impatient_command",
        entry="support.fakes.impatient_command:main",
    )
    with contextlib.closing(forks):
        yield forks


async def test_a_run_whose_controller_and_trainer_stood_still_goes_on_without_a_fault(
    tmp_path: Path, tiny_model: Path, impatient: Forks
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
    async with command(
        tmp_path, "run", "config.toml", cwd=tmp_path, forks=impatient
    ) as run:
        await until_row(tmp_path, run, 1)
        (controller,) = run.find(CONTROLLER)
        (trainer,) = run.find(f"{TRAINER} ")
        lasting = [trainer, *run.find(ROLLOUT_SERVER), *run.engines()]
        controller.send_signal(signal.SIGSTOP)
        await until_gone([controller], limit_s=SILENT_LIMIT_S + START_LIMIT_S)
        await until_row(tmp_path, run, 2)
        assert [is_alive(process) for process in lasting] == [True] * len(lasting)
        assert await chaos.stop(trainer, CALL_TIMEOUT_S + 1.0)
        assert await run.wait(LIMIT_S) == 0, run.out + run.err
    assert run.err == ""
    assert (
        f"! the controller has given no answer for {SILENT_LIMIT_S:g} s: it is ended"
        in run.out
    )
    (restart,) = (line for line in run.out.splitlines() if "; start " in line)
    assert "! controller was killed by SIGKILL" in restart
    summary = checked(tmp_path / "run")
    assert (summary["state"], summary["steps"], summary["ledger"]["lost"]) == (
        "finished",
        STEPS,
        0,
    )
    check_replay(tmp_path / "run")
