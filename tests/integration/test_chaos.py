"""A run under faults of its processes passes `slipstream verify`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.core.errors import RunFailed
from support.rigs.chaos import run_chaos
from support.rigs.run_processes import ROOT
from support.rigs.run_processes import write_config as write_run
from support.rigs.smallest_run import own_settings


async def test_a_run_that_is_refused_says_why(tmp_path, tiny_model) -> None:
    path = write_run(tmp_path, tiny_model)
    refused = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(2)"]
    with pytest.raises(RunFailed, match="the run did not begin: no such model"):
        await run_chaos(
            path,
            [],
            kills=1,
            seed=0,
            every_s=1.0,
            roles="",
            partitions=False,
            command=refused,
        )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_under_faults_loses_and_doubles_nothing(tmp_path: Path, tiny_model: Path):
    path = write_run(tmp_path, tiny_model, run__steps=100_000, evaluations=[])
    command = [sys.executable, "-m", "support.fakes.quick_run", "chaos", str(path)]
    chaos = subprocess.run(
        [*command, "--kills=12", "--seed=3", "--every-s=0.5", "--partitions"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        check=False,
    )
    parsed = json.loads(chaos.stdout)
    assert chaos.returncode == 0, parsed
    assert (parsed["fired"], parsed["found"], parsed["replay_equal"]) == (12, [], True)


LOOP = """
[run]
name = "own"
steps = 1000000
[model]
dtype = "float32"
[sampling]
max_reply_tokens = 8
max_episode_tokens = 64
[checkpoint]
every_steps = 5
keep_last = 100000
[lora]
rank = 8
adapters = ["a", "b"]
publish = "adapters"
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_clients_loops_under_faults_are_those_without(
    tmp_path: Path, tiny_model: Path
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(LOOP)
    command = [sys.executable, "-m", "support.fakes.quick_run", "loop-chaos", str(path)]
    process = subprocess.run(
        [
            *command,
            *own_settings(tmp_path, tiny_model),
            "--kills=60",
            "--every-s=0.3",
            "--seeds=2",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        check=False,
    )
    parsed = json.loads(process.stdout)
    assert process.returncode == 0, parsed
    assert (parsed["fired"], parsed["found"], parsed["different"]) == (60, [], [])
    assert parsed["replay_equal"]
