"""A real engine that copies its weights by a plan: on a CPU, whose matrices are kept plain."""

from pathlib import Path

import pytest
from support.rigs.receiver_story import judge, run_rig


@pytest.mark.long
def test_a_plan_copies_what_the_loader_would_load(tmp_path: Path) -> None:
    report = run_rig(tmp_path, "--shape", "tied", "--plain", limit_s=240)
    judge(report)
    # What arrives between the first token and the last of the replies.
    assert all(publish["staged"] for publish in report["publish"] if publish["is_busy"])


@pytest.mark.slow
def test_two_tensor_parallel_workers_copy_their_shares(tmp_path: Path) -> None:
    judge(run_rig(tmp_path, "--plain", "--tensor-parallel-size", "2", limit_s=300))
