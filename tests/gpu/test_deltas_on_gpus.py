"""What a step of AdamW changed, from GPU to GPU over NCCL, as the benchmark sends it."""

import argparse
import asyncio
from pathlib import Path

import pytest
import torch

from benchmarks.weights import delta

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("place", ["gpu", "host"])
def test_changes_travel_over_nccl_bit_for_bit(tmp_path: Path, place: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = argparse.Namespace(
        device="cuda",
        shape="0.6B",
        servers=1,
        repeats=3,
        bucket_mib=64,
        name="delta",
        delta=place,
        learning_rate=1e-6,
    )
    # RuntimeError where a digest or a parameter differs.
    found = asyncio.run(delta.measure(arguments, tmp_path))
    lines, ratios = delta.summary(found)
    print("\n".join(lines))
    assert ratios["bytes of a whole publish"] < 0.1
