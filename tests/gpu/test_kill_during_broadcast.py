"""A rollout server that dies in the middle of a broadcast over NCCL: three GPUs."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch
from support.rigs.gpu_records import note
from support.rigs.kill_scenario import Moment, check, config_of, kill_one_of_two

from benchmarks.common.rig import Placement
from benchmarks.common.shapes import make_apart

pytestmark = [
    pytest.mark.timeout(420),
    pytest.mark.skipif(torch.cuda.device_count() < 3, reason="fewer than 3 GPUs"),
]

# With one channel 1.2 GB take some hundredths of a second, not three thousandths, so that a
# moment can lie in their middle.
SLOW = {"NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_NCHANNELS": "1"}


def test_a_server_killed_while_it_receives_stops_nobody_and_comes_back(
    tmp_path: Path,
) -> None:
    model = make_apart(tmp_path / "0.6B", "0.6B", max_positions=256)
    config = config_of(
        tmp_path,
        model,
        "nccl",
        model={"dtype": "bfloat16"},
        learner={"threads": 4},
        rollout_server={"threads": 4, "gpu_memory_utilization": 0.3},
        algorithm={"learning_rate": 1e-6},
        weights={"bucket_mib": 16, "join_deadline_s": 60.0},
    )
    placement = Placement((0,), ((1,), (2,)))
    moments: list[Moment] = [0.02, "hung"]
    outcome = asyncio.run(kill_one_of_two(config, placement, moments, environ=SLOW))
    note("kill", **dataclasses.asdict(outcome))
    check(outcome, gap_mean=0.1)
