"""Weights into a real vLLM engine on a GPU: copy plan against loader, over gloo and NCCL.

Prints the time of each stage of each publish.
"""

from pathlib import Path

import pytest
import torch
from support.rigs.receiver_story import judge, run_rig

from benchmarks.common.measure import visible

LIMIT_S = 400


def num_gpus() -> int:
    # Asks the driver: this process must stay without a context.
    return torch.cuda.device_count()


@pytest.mark.parametrize("shape", ["dense", "tied", "biased", "moe"])
def test_a_plan_copies_what_the_loader_would_load(tmp_path: Path, shape: str) -> None:
    if num_gpus() < 1:
        pytest.skip("needs a GPU")
    judge(run_rig(tmp_path, "--shape", shape, limit_s=LIMIT_S))


@pytest.mark.parametrize("graphs", [False, True])
def test_weights_come_over_nccl(
    tmp_path: Path, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_gpus() < 2:
        pytest.skip("needs two GPUs")
    options = ["--sender-gpu", visible([0]), *(["--graphs"] if graphs else [])]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible([1]))
    report = run_rig(
        tmp_path,
        "--shape",
        "qwen3-0.6b",
        "--transport",
        "nccl",
        "--bucket-mib",
        "256",
        *options,
        limit_s=LIMIT_S,
    )
    judge(report)


def test_two_tensor_parallel_workers_take_weights_over_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_gpus() < 3:
        pytest.skip("needs three GPUs")
    sender = visible([0])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible([1, 2]))
    report = run_rig(
        tmp_path,
        "--shape",
        "qwen3-0.6b",
        "--transport",
        "nccl",
        "--bucket-mib",
        "256",
        "--tensor-parallel-size",
        "2",
        "--sender-gpu",
        sender,
        limit_s=LIMIT_S,
    )
    judge(report)
