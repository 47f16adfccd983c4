"""Users' environments in a run with all parts: every way in, and every way to break."""

import asyncio
import json
from pathlib import Path
from statistics import fmean

import pytest
from slipstream.client.status import EnvironmentStatus, RunStatus
from support.fakes.example_environments import Repeat
from support.rigs import run_processes
from support.rigs.waiting import LIMIT_S

pytestmark = [*run_processes.SLOW_RUN, pytest.mark.timeout(300)]

RUN_LIMIT_S = 200.0
SIZES = {
    "evaluations": [],
    "algorithm__group_size": 8,
    "algorithm__groups_per_step": 6,
    "rollout_server__max_episodes": 128,
}


# The names of each kind of sabotage in the end, in the order of the tasks.
SABOTAGE = (
    "KeyError",
    "the reward must be a finite number, got nan",
    "within 3 s, the environment's timeout_s (user_environments.py:",
    "worker exited with code 3",
    "processes, more than rollout_server.environment_processes = 50",
    "more than rollout_server.environment_memory_gib = 1.00",
)
# Every end of a worker costs some seconds, on a busy machine many, and the hanging task more.
SABOTAGE_LIMIT_S = 600.0
SABOTAGE_STEPS = 10


def by_name(status: RunStatus) -> dict[str, EnvironmentStatus]:
    return {entry.name: entry for entry in status.environments}


def rewards_by_step(run: Path) -> list[float]:
    return [
        row["reward_mean"] for row in run_processes.rows_of(run) if "reward_mean" in row
    ]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("kind", ["Sabotaged", "SabotagedAgent"])
async def test_tasks_that_break_in_every_way_are_set_aside_and_all_others_are_learned(
    tmp_path: Path, tiny_model: Path, kind: str
) -> None:
    bad = set(range(0, 24, 4))
    entry = {
        "name": "sabotaged",
        "reference": f"user_environments:{kind}",
        "timeout_s": 3.0,
    }
    run_processes.write_config(
        run_processes.copy_environments(tmp_path),
        tiny_model,
        run__steps=SABOTAGE_STEPS,
        environments=[entry],
        algorithm__learning_rate=1e-2,
        rollout_server__environment_memory_gib=1.0,
        rollout_server__environment_processes=50,
        **SIZES | {"rollout_server__max_episodes": 64},
    )
    async with run_processes.command(
        tmp_path, "run", "config.toml", cwd=tmp_path
    ) as run:
        assert await run.wait(SABOTAGE_LIMIT_S) == 0, run.out + run.err
    summary = run_processes.checked(tmp_path / "run")
    assert summary["steps"] == SABOTAGE_STEPS
    assert summary["max_lag_seen"] <= 2
    records = run_processes.records_of(tmp_path / "run", "set_aside")
    set_aside = {r["task"]: r["cause"] for r in records}
    assert set(set_aside) == bad
    causes = [set_aside[task] for task in sorted(bad)]
    for cause, expected in zip(causes, SABOTAGE, strict=True):
        assert expected in cause
    assert {
        t.task_index for t in run_processes.trained_trajectories(tmp_path / "run")
    } == set(range(25)) - bad
    rewards = rewards_by_step(tmp_path / "run")
    assert fmean(rewards[-3:]) > 2 * fmean(rewards[:3]), rewards


async def test_an_environment_comes_in_by_config_by_submit_and_from_a_client(
    tmp_path, tiny_model
):
    folder = run_processes.copy_environments(tmp_path)
    environment = {
        "name": "configured",
        "reference": "user_environments:Repeat",
        "timeout_s": 5.0,
    }
    other = tmp_path / "other"
    config = run_processes.write_config(
        folder,
        tiny_model,
        run__steps=10_000,
        environments=[environment],
        security__submitted_paths=[str(other)],
        **SIZES,
    )
    address = run_processes.address_of(config)
    token = str(run_processes.token_of(config))

    async def ask(*arguments: str, cwd: Path = folder) -> tuple[int, str, str]:
        parts = (*arguments, "--controller", address, "--token-file", token)
        result = await asyncio.to_thread(run_processes.run_command, *parts, cwd=cwd)
        return result.returncode, result.stdout, result.stderr

    async with run_processes.command(tmp_path, "run", "config.toml", cwd=folder) as run:
        async with run_processes.connection(config, run) as client:
            await run_processes.until_step(client, 1)

            other.mkdir()
            (folder / "user_environments.py").rename(other / "their_environments.py")
            submit = ("submit", "their_environments:Repeat", "--name", "submitted")
            code, out, err = await ask(
                *submit, "--args", '{"num_letters": 4}', cwd=other
            )
            assert (code, err) == (0, "")
            ready, sent = out.splitlines()
            assert ready == "environment submitted is ready: 4 tasks"
            assert sent == (
                "no code was sent: servers load their_environments on their own machines"
            )

            refused = {
                submit: "has an environment submitted already",
                ("submit", "their_environments:Unmade"): "there is no dataset",
                ("submit", "no_such_module:E"): "no module 'no_such_module'",
                (
                    "submit",
                    "nonsense",
                ): "a reference is package.module:Class, got 'nonsense'",
                (
                    *submit[:2],
                    "--name",
                    "x",
                    "--weight",
                    "0",
                ): "weight must be between 1e-06",
            }
            for arguments, cause in refused.items():
                code, out, err = await ask(*arguments, cwd=other)
                assert (code, out) == (2, ""), err
                assert len(err.splitlines()) == 1
                assert cause in err

            serving = asyncio.create_task(
                client.serve(Repeat(5), name="served", episodes=24)
            )
            await run_processes.until_status(
                client,
                lambda status: (
                    all(
                        by_name(status)[name].groups_accepted >= 4
                        for name in ("configured", "submitted", "served")
                        if name in by_name(status)
                    )
                    and "served" in by_name(status)
                ),
                limit_s=RUN_LIMIT_S,
            )
            code, out, err = await ask("status", "--json")
            assert (code, err) == (0, "")
            entries = {
                entry["name"]: entry for entry in json.loads(out)["environments"]
            }
            assert set(entries) == {"configured", "submitted", "served"}
            assert [entry["num_tasks"] for entry in entries.values()] == [6, 4, 5]
            code, out, err = await ask("status")
            assert (code, err) == (0, "")
            assert "run-" in out
            assert "server-0" in out

            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            until_status = await run_processes.until_status(
                client, lambda status: by_name(status)["served"].state == "suspended"
            )
            assert (
                by_name(until_status)["served"].cause
                == "the client that served it left"
            )
            await run_processes.until_step(client, until_status.step + 3)

            serving = asyncio.create_task(
                client.serve(Repeat(5), name="served", episodes=24)
            )
            await run_processes.until_status(
                client,
                lambda status: (
                    by_name(status)["served"].state == "ready"
                    and by_name(status)["served"].groups_accepted > 0
                ),
            )
            assert len(run.find(run_processes.WORKER)) == 2
            code, out, err = await ask("stop")
            assert (code, err) == (0, "")
            async with asyncio.timeout(LIMIT_S):
                await serving
        assert await run.wait(LIMIT_S) == 0, run.out + run.err
    summary = run_processes.checked(tmp_path / "run")
    assert summary["max_lag_seen"] <= 2
    trained = {
        t.environment for t in run_processes.trained_trajectories(tmp_path / "run")
    }
    assert trained == {"configured", "submitted", "served"}
