"""Digests on the GPU, and broadcasts between processes of which one is killed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.protocol.weights.digests import bucket_tensor_digests
from support.rigs.gpu_records import note

from benchmarks.common.measure import visible

pytestmark = pytest.mark.timeout(300)
MEMBER = Path(__file__).parents[1] / "support" / "ranks" / "nccl_member.py"
MIB = 1 << 20


def layout(rng: random.Random, num_tensors: int, largest: int) -> list[TensorSpec]:
    sizes = [
        0,
        1,
        2,
        8191,
        8192,
        8193,
        *(rng.randrange(largest) for _ in range(num_tensors)),
    ]
    return [TensorSpec(f"t{n}", "bfloat16", (size,)) for n, size in enumerate(sizes)]


def test_digests_on_the_gpu_are_those_of_the_host() -> None:
    from slipstream.protocol.weights.digests import CudaDigests

    buckets = plan_buckets(layout(random.Random(0), 60, 700_000), 8 * MIB)
    memory = [torch.randint(0, 256, (b.num_bytes,), dtype=torch.uint8) for b in buckets]
    on_gpu = [data.cuda() for data in memory]
    torch.cuda.synchronize()
    digests = CudaDigests(buckets)
    stream = torch.cuda.Stream()
    for _ in range(2):
        for place, data in enumerate(on_gpu):
            digests.add(place, data.data_ptr(), stream.cuda_stream)
        bucket_digests = digests.read(stream.cuda_stream)
        assert bucket_digests == [
            bucket_tensor_digests(bucket, data.numpy().data)
            for bucket, data in zip(buckets, memory, strict=True)
        ]


@pytest.mark.parametrize("tensors_per_bucket", [1, 12, 300])
def test_digests_run_at_the_rate_of_the_memory(tensors_per_bucket: int) -> None:
    from slipstream.protocol.weights.digests import CudaDigests

    size = 256 * MIB // tensors_per_bucket // 2 // 8 * 8
    tensors = [
        TensorSpec(f"t{n}", "bfloat16", (size,)) for n in range(tensors_per_bucket)
    ]
    buckets = plan_buckets(tensors, 256 * MIB) * 4
    data = [torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    digests = CudaDigests(buckets)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    best = 0.0
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        for place in range(4):
            digests.add(place, data[place].data_ptr(), stream.cuda_stream)
        end.record(stream)
        stream.synchronize()
        best = max(
            best, sum(b.num_bytes for b in buckets) / begin.elapsed_time(end) / 1e6
        )
    note(
        "nccl_wire", test="digest", tensors=tensors_per_bucket, gb_per_s=round(best, 1)
    )
    assert best > 1000


@contextlib.contextmanager
def members(folder: Path, *modes: str):
    """One process for each GPU; each says what it does in lines of JSON."""
    started = [
        subprocess.Popen(
            [
                sys.executable,
                str(MEMBER),
                str(folder),
                str(rank),
                str(len(modes)),
                mode,
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": visible([rank])},
        )
        for rank, mode in enumerate(modes)
    ]
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def lines_of(process: subprocess.Popen[str]) -> list[dict[str, object]]:
    output, _ = process.communicate(timeout=120)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_broadcasts_reach_every_gpu(world_size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"fewer than {world_size} GPUs")
    with members(tmp_path, *["broadcast"] * world_size) as processes:
        outputs = [lines_of(process) for process in processes]
    assert [process.returncode for process in processes] == [0] * world_size
    for line in outputs[0]:
        note("nccl_wire", test="broadcast", world_size=world_size, **line)
    digests = [
        [line["digests"] for line in lines if "digests" in line] for lines in outputs
    ]
    assert digests[0]
    assert all(other == digests[0] for other in digests)


def test_kill_of_a_receiver_in_mid_broadcast_costs_one_deadline(tmp_path: Path) -> None:
    world_size = min(torch.cuda.device_count(), 4)
    if world_size < 2:
        pytest.skip("fewer than 2 GPUs")
    with members(tmp_path, *["survive"] * (world_size - 1), "victim") as processes:
        while not (tmp_path / "broadcasting").exists():
            assert processes[0].poll() is None
            time.sleep(0.01)
        processes[-1].send_signal(signal.SIGKILL)
        outputs = [lines_of(process) for process in processes[:-1]]
    assert [process.returncode for process in processes[:-1]] == [0] * (world_size - 1)
    for rank, lines in enumerate(outputs):
        for line in lines:
            note("nccl_wire", test="kill", world_size=world_size, rank=rank, **line)
        (line,) = lines
        assert "was not done within 1 s" in line["error"]


def test_member_that_dies_before_the_first_broadcast_leaves_nothing_on_the_others(
    tmp_path: Path,
) -> None:
    world_size = min(torch.cuda.device_count(), 4)
    if world_size < 3:
        # With two members NCCL lets the one that lives send a few bytes without an error.
        pytest.skip("fewer than 3 GPUs")
    with members(tmp_path, *["left"] * (world_size - 1), "leave") as processes:
        outputs = [lines_of(process) for process in processes]
    assert [process.returncode for process in processes] == [0] * world_size
    for rank, (line,) in enumerate(outputs[:-1]):
        note("nccl_wire", test="left", world_size=world_size, rank=rank, **line)
        assert line["error"]
