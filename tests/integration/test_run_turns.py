"""Whole runs in which learner and engine compute in turn; they share the CPU in place of a GPU."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from support.rigs.run_processes import (  # noqa: E402
    ROLLOUT_SERVER,
    TRAINER,
    check_ledger,
    command,
    connection,
    copy_environments,
    kill,
    rows_of,
    run_command,
    summary_of,
    until_step,
    write_config,
)

pytestmark = pytest.mark.usefixtures("nothing_survives")

# Both sides load again within a minute, on a machine without other work.
RESTART_LIMIT_S = 300.0
SETTINGS = {
    "controller__turns": "sleep",
    "learner__offload": {"gradients": True, "optimizer": True},
    "algorithm__group_size": 4,
    "algorithm__groups_per_step": 4,
    "algorithm__max_staleness": 2,
    "evaluations": [],
}


@pytest.mark.slow
def test_a_run_in_turns_trains_what_its_engine_sampled(tmp_path: Path, tiny_model: Path) -> None:
    folder = copy_environments(tmp_path)
    write_config(folder, tiny_model, run__steps=5, **SETTINGS)
    result = run_command("run", "config.toml", cwd=folder, limit_s=400)
    assert result.returncode == 0, result.stdout + result.stderr
    told = result.stdout
    # The learner has given its memory back before the engine starts.
    assert told.index("the trainer has") < told.index("rollout server server-0 joined")
    run = folder / "run"
    rows = rows_of(run)
    assert len(rows) == 5
    check_ledger(summary_of(run))
    # Versions and log-probabilities are right across all rests: both compute in float32.
    assert max(row["logprob_gap_max"] for row in rows if "logprob_gap_max" in row) < 1e-2
    log = (run / "logs" / "server-0.log").read_text()
    # vLLM on CPUs says so at each order, and keeps its memory.
    assert "sleep mode is not supported on CPU" in log


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_either_side_may_be_killed_at_any_moment_of_its_turn(
    tmp_path: Path, tiny_model: Path
) -> None:
    folder = copy_environments(tmp_path)
    changes = {"run__steps": 4000, "checkpoint__every_steps": 2, "run__resume": "auto"}
    config = write_config(folder, tiny_model, **SETTINGS, **changes)
    async with (
        command(folder / "first", "run", "config.toml", cwd=folder) as started,
        connection(config, started) as client,
    ):
        step = (await until_step(client, 3, limit_s=RESTART_LIMIT_S)).step
        for victim in (TRAINER, ROLLOUT_SERVER, TRAINER):
            for process in started.find(victim):
                kill(process)
            step = (await until_step(client, step + 6, limit_s=RESTART_LIMIT_S)).step
        await client.stop("the test is over")
        assert await started.wait(120) == 0
    check_ledger(summary_of(folder / "run"))
