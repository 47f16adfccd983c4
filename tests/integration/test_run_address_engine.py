"""A whole run whose tokens come from an unmodified vLLM server behind an address."""

from pathlib import Path

import pytest
from support.rigs import run_processes
from support.rigs.smallest_run import run_smallest
from support.rigs.teacher_server import teacher_server

pytestmark = run_processes.SLOW_RUN

STEPS = 10
# What docs/guides/engine_at_an_address.md asks of the server.
FLAGS = (
    "--enable-scale-out",
    "--logprobs-mode=processed_logprobs",
    "--generation-config=vllm",
    "--dtype=float32",
    "--max-model-len=80",
    "--max-num-seqs=16",
)


def test_ten_steps_by_an_unmodified_server_lose_no_token_and_agree_with_each_version(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    log = tmp_path / "vllm.log"
    with teacher_server(tiny_model, log, more=FLAGS) as base_url:
        url = base_url.removesuffix("/v1")
        summary, rows = run_smallest(
            tmp_path,
            tiny_model,
            "model.dtype=float32",
            f"run.steps={STEPS}",
            f"rollout_server.engine_url={url}",
            "weights.transport=gloo",
            "weights.verify_every=1",
            "controller.turns=off",
        )
    assert len([row for row in rows if "step" in row]) == STEPS
    ledger = summary["ledger"]
    assert ledger["generated"] == ledger["trained"] > STEPS
    assert ledger["difference"] == ledger["lost"] == 0
    # A probe of each version went through the server, and agreed with the trainer.
    assert summary["publishes_verified"] == summary["publishes"] >= STEPS
    assert summary["probe_gap_max"] <= 1e-3
    assert summary["logprob_gap_tokens"] > 0
    assert summary["logprob_gap_max"] <= 1e-3
    assert summary["max_lag_seen"] <= summary["max_staleness"]
    # No version is left behind.
    assert not (tmp_path / "smallest" / "address_engine").exists()
