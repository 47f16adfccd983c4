"""Whole runs whose rollout engines have several stages."""

import asyncio
import re
from pathlib import Path

import pytest
from support.fakes.tiny_models import make_model_folder
from support.rigs import run_processes
from support.rigs.smallest_run import run_smallest

pytestmark = pytest.mark.usefixtures("nothing_survives")

STAGES = "rollout_server.pipeline_parallel_size=2"
PROVED = (
    "model.dtype=float32",
    "weights.verify_every=1",
)
RUN_LIMIT_S = 300.0


def check_proofs(summary: dict) -> None:
    assert (summary["state"], summary["steps"]) == ("finished", 3)
    assert summary["publishes_verified"] == summary["publishes"] >= 3
    assert summary["probe_gap_max"] <= 1e-4
    assert summary["logprob_gap_max"] <= 1e-4


def test_a_run_with_two_stages_trains_what_it_generated(
    tmp_path: Path, tiny_model: Path
) -> None:
    summary, _ = run_smallest(tmp_path, tiny_model, STAGES, *PROVED)
    check_proofs(summary)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            ("rollout_server.tensor_parallel_size=2",), id="two workers a stage"
        ),
        pytest.param(
            ("lora.rank=4", "lora.alpha=8", "lora.publish=adapters"),
            id="adapters",
        ),
    ],
)
def test_stages_go_together_with(settings: tuple[str, ...], tmp_path: Path) -> None:
    model = make_model_folder(
        tmp_path / "model", num_attention_heads=4, num_key_value_heads=2
    )
    summary, _ = run_smallest(tmp_path, model, STAGES, *PROVED, *settings)
    check_proofs(summary)


@pytest.mark.slow
@pytest.mark.timeout(700)
async def test_a_run_survives_the_end_of_a_stage(
    tmp_path: Path, tiny_model: Path
) -> None:
    slow = {
        "name": "slow",
        "reference": "user_environments:Slow",
        "args": {"step_s": 0.5},
    }
    config = run_processes.write_config(
        run_processes.copy_environments(tmp_path),
        tiny_model,
        run__steps=8,
        environments=[slow],
        evaluations=[],
        algorithm__group_size=8,
        algorithm__groups_per_step=8,
        rollout_server__pipeline_parallel_size=2,
    )
    async with run_processes.command(
        tmp_path, "run", "config.toml", cwd=tmp_path
    ) as run:
        async with run_processes.connection(config, run) as client:
            await run_processes.until_step(client, 2)
            (server,) = run.find(run_processes.ROLLOUT_SERVER)
            # The engine has forked the workers in the order of their ranks.
            _, _, last_stage, *_ = run.engines()
            last_stage.kill()
            gone = await run_processes.until_event(
                client, lambda event: "server-0 is gone" in event.text
            )
            async with asyncio.timeout(RUN_LIMIT_S):
                async for event in client.watch(after=gone.number):
                    if "server-0 joined" in event.text:
                        break
        assert await run.wait(RUN_LIMIT_S) == 0, run.out + run.err
        await run_processes.until_gone([server])
    summary = run_processes.checked(tmp_path / "run")
    assert summary["steps"] == 8
    assert re.search(r"; difference 0$", run.out, re.MULTILINE)
