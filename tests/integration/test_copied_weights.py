"""A real engine that copies its weights by a plan: on a CPU, whose matrices are kept plain."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from support.rigs.receiver_story import judge, run_rig  # noqa: E402


def test_a_plan_copies_what_the_loader_would_load(tmp_path: Path) -> None:
    judge(run_rig(tmp_path, "--shape", "tied", "--plain", limit_s=240))


@pytest.mark.slow
def test_two_tensor_parallel_workers_copy_their_shares(tmp_path: Path) -> None:
    judge(run_rig(tmp_path, "--plain", "--tensor-parallel-size", "2", limit_s=300))
