"""A real engine with linear layers in FP8 that is sent new weights, on a CPU."""

from pathlib import Path

import pytest
from support.references.learner_scores import gaps_of
from support.rigs.receiver_story import judge, run_rig

pytestmark = pytest.mark.long


@pytest.mark.parametrize("cache", ["auto", pytest.param("fp8", marks=pytest.mark.slow)])
def test_an_engine_in_fp8_takes_weights_and_stays_near_the_learner(tmp_path, cache) -> None:
    report = run_rig(
        tmp_path, *("--quantization", "fp8_per_channel", "--kv-cache-dtype", cache), limit_s=300
    )
    judge(report, by_plan=False)
    gaps = gaps_of(tmp_path, report, device="cpu")
    print(gaps)
    # Rounding is there, and wrong weights are far beyond it.
    assert 1e-3 < gaps.own < 0.25 * gaps.other


@pytest.mark.slow
def test_two_tensor_parallel_workers_take_the_same_weights(tmp_path: Path) -> None:
    options = ("--quantization", "fp8_per_channel", "--tensor-parallel-size", "2")
    judge(run_rig(tmp_path, *options, limit_s=300), by_plan=False)
