"""A whole run whose engine keeps its linear layers in FP8."""

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


@pytest.mark.parametrize("delta", ["off", "host"])
def test_a_run_quantises_what_it_publishes_and_corrects_the_gap(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, delta: str
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
        "rollout_server.quantization=fp8_per_channel",
        "algorithm.max_staleness=0",
        "algorithm.learning_rate=1e-5",
        f"weights.delta={delta}",
        "weights.verify_every=1",
        limit_s=500,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    summary, rows = summary_of(tmp_path / "smallest"), rows_of(tmp_path / "smallest")
    print(summary["probe_gap_max"], summary["logprob_gap_mean"], summary["logprob_gap_max"])
    assert all(row["publish_copied"] == 1 for row in rows if row.get("weights_changed"))
    assert summary["publishes_delta"] == (STEPS if delta == "host" else 0)
    # Every token has lag 0; what is left is rounding, more than bfloat16's.
    assert 1e-4 < summary["logprob_gap_mean"] < 0.1
    assert 1e-3 < summary["probe_gap_max"] < 0.5
    check_ledger(summary)
