"""Whole runs with vLLM whose rollout servers take weights from storage; a trainer is killed."""

from pathlib import Path

import pytest
from support.rigs.run_processes import SLOW_RUN, checked, rows_of, succeed
from support.rigs.smallest_run import SHORT, SMALLEST, own_settings, plain_engine

__all__ = ["plain_engine"]
pytestmark = [*SLOW_RUN, pytest.mark.timeout(600)]
STEPS = 5


@pytest.mark.usefixtures("plain_engine")
def test_a_run_whose_server_reads_a_folder(tmp_path: Path, tiny_model: Path) -> None:
    succeed(
        "run",
        SMALLEST,
        *own_settings(tmp_path, tiny_model),
        *SHORT,
        f"run.steps={STEPS}",
        "model.dtype=bfloat16",
        "algorithm.learning_rate=1e-6",
        f"weights.storage_url={tmp_path / 'storage'}",
        "weights.verify_every=2",
        limit_s=500,
    )
    summary = checked(tmp_path / "smallest")
    rows = rows_of(tmp_path / "smallest")
    print(
        {
            k: v
            for k, v in summary.items()
            if "stored" in k or "fetch" in k or "publish" in k
        }
    )
    print(rows[-1])
    assert summary["publishes"] == 0
    assert summary["versions_stored"] >= 2
    assert summary["versions_fetched"] >= 2
    assert summary["publishes_verified"] >= 1
    assert summary["probe_gap_max"] < 0.16
    bytes_of_version = summary["stored_whole_bytes"] / summary["versions_stored"]
    # The first version is whole, the others are what a step changes.
    num_later = summary["versions_stored"] - 1
    assert summary["stored_bytes"] < bytes_of_version * (1 + num_later / 10)
    assert rows[-1]["publish_copied"] == 1
    assert not [p for p in (tmp_path / "storage").rglob("*") if p.is_file()]
