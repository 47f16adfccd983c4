"""A whole run whose publishes send what a step changed, to an engine that copies its weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from slipstream.client.launch.preflight import free_port  # noqa: E402
from support.fakes import plain_engine_hook  # noqa: E402
from support.rigs.run_processes import (  # noqa: E402
    ROOT,
    check_ledger,
    rows_of,
    run_command,
    summary_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("nothing_survives"),
]
STEPS = 5


def test_a_run_publishes_what_its_steps_changed(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = plain_engine_hook.install(tmp_path / "hook")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hook), os.getenv("PYTHONPATH", "")]))
    run = run_command(
        "run",
        ROOT / "deploy" / "configs" / "smallest.toml",
        f"model.path={tiny_model}",
        f"run.dir={tmp_path}",
        f"run.steps={STEPS}",
        f"controller.address=127.0.0.1:{free_port('127.0.0.1')}",
        "model.dtype=bfloat16",
        "algorithm.learning_rate=1e-6",
        "weights.delta=host",
        # Some with a probe, some that begin with their order.
        "weights.verify_every=2",
        limit_s=500,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    summary, rows = summary_of(tmp_path / "smallest"), rows_of(tmp_path / "smallest")
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
    check_ledger(summary)
