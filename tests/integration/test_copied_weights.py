"""A real engine is sent new weights: copied by a plan, or with linear layers in FP8.

On a CPU, whose matrices are kept plain where a plan copies them.
"""

from pathlib import Path

import pytest
from support.references.learner_scores import gaps_of
from support.rigs.receiver_story import judge, run_rig

pytestmark = pytest.mark.long


def test_a_plan_copies_what_the_loader_would_load(tmp_path: Path) -> None:
    report = run_rig(tmp_path, "--shape", "tied", "--plain", limit_s=240)
    judge(report)
    # Tokens that arrive between the first token and the last of the replies.
    assert all(publish["staged"] for publish in report["publish"] if publish["is_busy"])


@pytest.mark.slow
def test_two_tensor_parallel_workers_copy_their_shares(tmp_path: Path) -> None:
    judge(run_rig(tmp_path, "--plain", "--tensor-parallel-size", "2", limit_s=300))


@pytest.mark.parametrize("cache", ["auto", pytest.param("fp8", marks=pytest.mark.slow)])
def test_an_engine_in_fp8_takes_weights_and_stays_near_the_learner(
    tmp_path, cache
) -> None:
    report = run_rig(
        tmp_path,
        "--quantization",
        "fp8_per_channel",
        "--kv-cache-dtype",
        cache,
        limit_s=300,
    )
    judge(report, by_plan=False)
    gaps = gaps_of(tmp_path, report, device="cpu")
    print(gaps)
    # Rounding is there, and wrong weights are far beyond it.
    assert 1e-3 < gaps.own < 0.25 * gaps.other


@pytest.mark.slow
def test_two_tensor_parallel_workers_in_fp8_take_the_same_weights(
    tmp_path: Path,
) -> None:
    options = ("--quantization", "fp8_per_channel", "--tensor-parallel-size", "2")
    judge(run_rig(tmp_path, *options, limit_s=300), by_plan=False)
