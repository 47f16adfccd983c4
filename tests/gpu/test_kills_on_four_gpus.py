"""A trainer rank and a rollout server, each on a GPU of its own, are killed; the run goes on."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
import torch
from support.fakes.tiny_models import make_model_folder
from support.rigs import run_processes

# Rehearses everything without a GPU: on gloo, and in float32.
REHEARSAL = "SLIPSTREAM_REHEARSAL" in os.environ

pytestmark = [
    pytest.mark.timeout(560),
    pytest.mark.skipif(
        torch.cuda.device_count() < 4 and not REHEARSAL, reason="fewer than 4 GPUs"
    ),
]
STEPS = 60
STARTS_IN_S = 240.0


def test_two_ranks_and_two_servers_lose_one_of_each_and_finish(tmp_path: Path) -> None:
    asyncio.run(lose_one_of_each(tmp_path))


async def lose_one_of_each(tmp_path: Path) -> None:
    changes = (
        {} if REHEARSAL else {"model__dtype": "bfloat16", "weights__transport": "nccl"}
    )
    config = run_processes.write_config(
        run_processes.copy_environments(tmp_path),
        make_model_folder(
            tmp_path / "model", num_attention_heads=4, num_key_value_heads=2
        ),
        run__steps=STEPS,
        evaluations=[],
        environments=[
            {
                "name": "slow",
                "reference": "user_environments:Slow",
                "args": {"step_s": 0.5},
            }
        ],
        algorithm__group_size=8,
        algorithm__groups_per_step=8,
        controller__heartbeat_timeout_s=5.0,
        learner__world_size=2,
        learner__export_final=False,
        rollout_server__count=2,
        rollout_server__max_episodes=64,
        rollout_server__start_timeout_s=STARTS_IN_S,
        weights__verify_every=1,
        **changes,
    )
    times = {}
    async with run_processes.command(
        tmp_path, "run", "config.toml", cwd=tmp_path
    ) as run:
        async with run_processes.connection(config, run) as client:
            await run_processes.until_step(client, 5, limit_s=STARTS_IN_S)
            (rank,) = (
                process
                for process in run.find(f"{run_processes.TRAINER} ")
                if process.environ().get("RANK") == "1"
            )
            start_s = time.monotonic()
            run_processes.kill(rank)
            newest = (await client.status()).step
            await run_processes.until_step(client, newest + 2, limit_s=STARTS_IN_S)
            times["rank"] = time.monotonic() - start_s
            server = run.find(run_processes.ROLLOUT_SERVER)[0]
            start_s = time.monotonic()
            run_processes.kill(server)
            gone = await run_processes.until_event(
                client, lambda event: "is gone" in event.text
            )
            newest = (await client.status()).step
            await run_processes.until_step(client, newest + 2, limit_s=STARTS_IN_S)
            times["server"] = time.monotonic() - start_s
            async with asyncio.timeout(STARTS_IN_S):
                async for event in client.watch(after=gone.number):
                    if "joined" in event.text:
                        break
            times["server joined"] = time.monotonic() - start_s
        assert await run.wait(STARTS_IN_S) == 0, run.out + run.err
    summary = run_processes.checked(tmp_path / "run")
    print(
        json.dumps(
            times | {key: summary[key] for key in ("steps", "ledger", "max_lag_seen")}
        )
    )
    assert summary["steps"] == STEPS
    # A server that joins gets the newest weights again, which is a publish of its own.
    assert summary["publishes_verified"] >= summary["publishes"]
    assert summary["max_lag_seen"] <= 2
