"""A whole run whose publishes send what a step changed, to an engine that copies its weights."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from support.rigs.smallest_run import plain_engine, run_smallest  # noqa: E402

__all__ = ["plain_engine"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("nothing_survives", "plain_engine"),
]
STEPS = 5


def test_a_run_publishes_what_its_steps_changed(tmp_path: Path, tiny_model: Path) -> None:
    summary, rows = run_smallest(
        tmp_path,
        tiny_model,
        f"run.steps={STEPS}",
        "model.dtype=bfloat16",
        "algorithm.learning_rate=1e-6",
        "weights.delta=host",
        # Some with a probe, some that begin with their order.
        "weights.verify_every=2",
    )
    print({name: value for name, value in summary.items() if "publish" in name})
    assert summary["publishes"] == STEPS + 1
    # The first goes to a server that holds nothing.
    assert summary["publishes_delta"] == STEPS
    whole = summary["published_whole_bytes"] / summary["publishes"]
    assert summary["published_bytes"] < whole * (1 + STEPS / 10)
    sent = [row for row in rows if row.get("weights_bytes", whole) < whole]
    assert len(sent) >= STEPS - 1
    for row in sent:
        assert row["weights_whole_bytes"] == whole
        assert 0 < row["weights_changed"] < 0.03
        assert row["publish_copied"] == 1
    assert summary["probe_gap_max"] < 0.16
