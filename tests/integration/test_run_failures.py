"""Processes of a run are killed: it goes on, or ends at once with the cause; nothing is left."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest
from slipstream.client import Client
from support.rigs import run_processes
from support.rigs.waiting import until

pytestmark = [*run_processes.SLOW_RUN, pytest.mark.timeout(700)]

# A run that is killed has ended so long after.
END_LIMIT_S = 300.0
# A run that goes on to its end, with a new engine on the way.
RUN_LIMIT_S = 300.0
# Commands that tests fork name themselves like this.
RESUME = f"resume it with: {sys.executable} -m slipstream.client.cli run config.toml"


def write_slow_run(folder: Path, model: Path, **changes: object) -> Path:
    """A run whose episodes are open long enough to be killed."""
    slow = {
        "name": "slow",
        "reference": "user_environments:Slow",
        "args": {"step_s": 0.5},
    }
    settings = {
        "run__steps": 10_000,
        "environments": [slow],
        "evaluations": [],
        "algorithm__group_size": 8,
        "algorithm__groups_per_step": 8,
        "controller__heartbeat_timeout_s": 10.0,
        "rollout_server__max_episodes": 64,
    }
    return run_processes.write_config(
        run_processes.copy_environments(folder), model, **(settings | changes)
    )


async def until_in_flight(client: Client, tokens: int) -> None:
    await run_processes.until_status(client, lambda run: run.ledger.in_flight > tokens)


async def test_a_killed_rollout_server_is_started_again_and_the_run_finishes(
    tmp_path, tiny_model
):
    hold = tmp_path / "hold"
    args = {"step_s": 0.5, "hold": str(hold)}
    slow = {"name": "slow", "reference": "user_environments:Slow", "args": args}
    config = write_slow_run(tmp_path, tiny_model, run__steps=12, environments=[slow])
    async with run_processes.command(
        tmp_path, "run", "config.toml", cwd=tmp_path
    ) as run:
        async with run_processes.connection(config, run) as client:
            await run_processes.until_step(client, 4)
            (server,) = run.find(run_processes.ROLLOUT_SERVER)
            below = run_processes.descendants(server.pid)
            assert run.engines()
            hold.mkdir()
            await until((hold / "held").exists, RUN_LIMIT_S)
            # A single report may have been on its way; the second tells of the held episode's
            # tokens.
            for _ in range(2):
                told_s = (await client.status()).servers[0].uptime_s
                await run_processes.until_status(
                    client, lambda run, told_s=told_s: run.servers[0].uptime_s > told_s
                )
            run_processes.kill(server)
            await run_processes.until_gone([server, *below])
            shutil.rmtree(hold)
            gone = await run_processes.until_event(
                client, lambda event: "server-0 is gone" in event.text
            )
            async with asyncio.timeout(RUN_LIMIT_S):
                async for event in client.watch(after=gone.number):
                    if "server-0 joined" in event.text:
                        break
            assert (await client.status()).ledger.lost > 0
        assert await run.wait(RUN_LIMIT_S) == 0, run.out + run.err
    summary = run_processes.checked(tmp_path / "run")
    assert summary["steps"] == 12
    assert summary["max_lag_seen"] <= 2
    assert run.err == ""
    assert re.search(
        r"! server-0 was killed by SIGKILL.*; start 2$", run.out, re.MULTILINE
    )
    assert "no rollout server is left here: server-0 loads its engine again" in run.out
    assert re.search(r"lost [1-9].*; difference 0$", run.out, re.MULTILINE)


async def test_a_run_whose_rank_dies_again_and_again_ends_with_the_cause(
    tmp_path, tiny_model
):
    config = write_slow_run(tmp_path, tiny_model, learner__world_size=2)
    async with run_processes.command(
        tmp_path, "run", "config.toml", cwd=tmp_path
    ) as run:
        async with run_processes.connection(config, run) as client:
            await run_processes.until_step(client, 2)
        everything = run_processes.descendants(run.process.pid)
        async with asyncio.timeout(RUN_LIMIT_S):
            while run.process.returncode is None:
                for process in run.find(f"{run_processes.TRAINER} "):
                    # A process may end while it is looked at.
                    with contextlib.suppress(psutil.Error):
                        if process.environ().get("RANK") == "1":
                            process.kill()
                await asyncio.sleep(0.05)
        assert await run.wait(END_LIMIT_S) == 1
        await run_processes.until_gone(everything)
    assert run.out.count("the trainer starts again") == 3
    log = tmp_path / "run" / "logs" / "trainer-rank-1.log"
    assert run.err == f"slipstream: trainer-rank-1 was killed by SIGKILL (log: {log})\n"


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name
)
async def test_a_signal_ends_the_run_in_order(number, tmp_path, tiny_model):
    config = write_slow_run(tmp_path, tiny_model)
    async with run_processes.command(
        tmp_path, "run", "config.toml", cwd=tmp_path
    ) as run:
        async with run_processes.connection(config, run) as client:
            await run_processes.until_step(client, 2)
            await until_in_flight(client, 50)
        everything = run_processes.descendants(run.process.pid)
        # A terminal sends it to the whole group.
        os.killpg(run.process.pid, number)
        assert await run.wait(END_LIMIT_S) == 128 + number, run.out + run.err
        await run_processes.until_gone(everything)
    assert run.err == ""
    assert f"{number.name}: the run is stopped in order" in run.out
    summary = run_processes.checked(tmp_path / "run")
    ending = f"stopped at version {summary['steps']} of 10000; {RESUME}\n"
    assert run.out.endswith(ending)
    assert summary["state"] == "stopped"
    assert number.name in summary["cause"]
    assert summary["steps"] >= 2
    assert (tmp_path / "run" / "checkpoints" / "final" / "model.safetensors").is_file()


async def test_a_sigterm_of_all_processes_that_still_start_ends_the_run_in_order(
    tmp_path: Path, tiny_model: Path
) -> None:
    """A scheduler sends it to each process of a job, also to those that cannot handle it yet."""
    write_slow_run(tmp_path, tiny_model)
    async with run_processes.command(
        tmp_path, "run", "config.toml", cwd=tmp_path
    ) as run:
        await until(lambda: run.find(f"{run_processes.TRAINER} "), END_LIMIT_S)
        everything = run_processes.descendants(run.process.pid)
        for process in everything:
            # A process may have ended by itself.
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGTERM)
        run.process.send_signal(signal.SIGTERM)
        assert await run.wait(END_LIMIT_S) == 128 + signal.SIGTERM, run.out + run.err
        await run_processes.until_gone(everything)
    assert run.err == ""
    assert "starts again" not in run.out


async def test_a_second_ctrl_c_ends_the_run_at_once(
    tmp_path: Path, tiny_model: Path
) -> None:
    # The environment's episodes take longer than any limit of the test.
    slow = {
        "name": "slow",
        "reference": "user_environments:Slow",
        "args": {"step_s": 600.0},
    }
    config = write_slow_run(
        tmp_path,
        tiny_model,
        environments=[{**slow, "timeout_s": 900.0}],
        rollout_server__drain_timeout_s=600.0,
    )
    async with run_processes.command(
        tmp_path, "run", "config.toml", cwd=tmp_path
    ) as run:
        async with run_processes.connection(config, run) as client:
            await until_in_flight(client, 50)
            everything = run_processes.descendants(run.process.pid)
            os.killpg(run.process.pid, signal.SIGINT)
            await run_processes.until_event(
                client, lambda event: "stopping" in event.text
            )
        os.killpg(run.process.pid, signal.SIGINT)
        # Servers get no time for their episodes.
        assert await run.wait(END_LIMIT_S) == 128 + signal.SIGINT, run.out + run.err
        await run_processes.until_gone(everything)
    assert run.err == ""
    assert run.out.endswith(f"! the run is ended at once; {RESUME}\n")


@pytest.mark.parametrize(
    "moment", ["before the controller listens", "before there is a trainer"]
)
async def test_ctrl_c_ends_a_run_that_has_not_begun(
    moment: str, tmp_path: Path, tiny_model: Path
):
    config = write_slow_run(tmp_path, tiny_model)
    async with run_processes.command(
        tmp_path, "run", "config.toml", cwd=tmp_path
    ) as run:
        if moment == "before the controller listens":
            await until(lambda: run.find(run_processes.CONTROLLER))
        else:
            async with run_processes.connection(config, run):
                assert "the trainer has" not in run.out
        os.killpg(run.process.pid, signal.SIGINT)
        assert await run.wait(END_LIMIT_S) == 128 + signal.SIGINT, run.out + run.err
    assert run.err == ""
    assert run_processes.summary_of(tmp_path / "run")["steps"] == 0


async def test_an_engine_that_does_not_start_is_started_twice_and_no_more(
    tmp_path, tiny_model
):
    # A cache of one block holds no episode.
    config = write_slow_run(
        tmp_path, tiny_model, rollout_server__engine={"num_gpu_blocks_override": 1}
    )
    async with run_processes.command(
        tmp_path, "run", "config.toml", cwd=tmp_path
    ) as run:
        assert await run.wait(RUN_LIMIT_S) == 1
    assert config.is_file()
    assert run.out.count("! server-0 exited with code 4: ") == 1
    # Once, when it comes.
    assert re.fullmatch(
        r"slipstream: server-0 exited with code 4: ValueError: .*\n", run.err
    )
    assert "the run failed" not in run.out


async def test_nothing_outlives_a_killed_command(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = write_slow_run(tmp_path, tiny_model)
    async with run_processes.command(
        tmp_path, "run", "config.toml", cwd=tmp_path
    ) as run:
        async with run_processes.connection(config, run) as client:
            await run_processes.until_step(client, 1)
        everything = run_processes.descendants(run.process.pid)
        assert run.engines()
        run_processes.kill(psutil.Process(run.process.pid))
        assert await run.wait(END_LIMIT_S) == -signal.SIGKILL
        await run_processes.until_gone(everything)
