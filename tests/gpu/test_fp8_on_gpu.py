"""Weights into a real engine with linear layers in FP8 and CUDA graphs, and its gap to the learner.

Prints the time of each stage of each publish.
"""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from support.references.learner_scores import gaps_of
from support.rigs.gpu_records import note
from support.rigs.receiver_story import judge, run_rig

LIMIT_S = 300


@pytest.mark.parametrize(
    ("method", "cache"), [("fp8_per_channel", "auto"), ("fp8_per_channel", "fp8")]
)
@pytest.mark.parametrize("shape", ["biased", "qwen3-6-layers", "qwen3-0.6b"])
def test_an_engine_in_fp8_takes_weights_through_vllms_loader(
    tmp_path: Path, method: str, cache: str, shape: str
) -> None:
    if torch.cuda.device_count() < 1:
        pytest.skip("needs a GPU")
    is_large = shape.startswith("qwen3")
    options = ["--graphs", "--bucket-mib", "64"] if is_large else []
    report = run_rig(
        tmp_path,
        "--shape",
        shape,
        "--quantization",
        method,
        "--kv-cache-dtype",
        cache,
        *options,
        limit_s=LIMIT_S,
    )
    gaps = gaps_of(tmp_path, report, device="cuda")
    note("fp8_gaps", shape=shape, method=method, cache=cache, **asdict(gaps))
    # Kernels for few tokens round otherwise than those for many, and an 8-bit cache each key again.
    judge(report, score_rounding=0.05 if cache == "auto" else 0.2, by_plan=False)
    assert 1e-3 < gaps.own < 0.5 * gaps.other
