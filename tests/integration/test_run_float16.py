"""A whole run in float16: engine, adapters, export and replay."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from slipstream.learner.controller.records.journal import read_records
from support.rigs.run_processes import succeed
from support.rigs.smallest_run import plain_engine, run_smallest

__all__ = ["plain_engine"]
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("nothing_survives", "plain_engine"),
]
STEPS = 3
# The probe's tolerance of bfloat16 would let eight times more pass.
TOLERANCE = 0.02
FLOAT16 = (f"run.steps={STEPS}", "model.dtype=float16", "weights.verify_every=1")


def check_replay(run: Path) -> None:
    recorded = [r["digest"] for r in read_records(run / "journal") if r["kind"] == "step"]
    assert len(recorded) == STEPS
    replay = succeed("replay", run, limit_s=200)
    assert replay.stdout.count("as recorded") == STEPS


def test_a_run_in_float16_agrees_says_what_overflowed_and_is_replayed(tmp_path, tiny_model):
    summary, rows = run_smallest(tmp_path, tiny_model, *FLOAT16, "algorithm.learning_rate=1e-6")
    run = tmp_path / "smallest"
    assert summary["probe_gap_max"] < TOLERANCE
    assert summary["logprob_gap_mean"] < TOLERANCE
    overflows = [int(row["gradient_overflows"]) for row in rows]
    assert summary["gradient_overflows"] == sum(overflows) > 0
    (log,) = (run / "logs").glob("controller*.log")
    said = re.findall(
        r"step (\d+): gradients left the range of float16 (\d+) times", log.read_text()
    )
    assert [(int(step), int(n)) for step, n in said] == [
        (step, n) for step, n in enumerate(overflows, 1) if n
    ]
    final = run / "checkpoints" / "final"
    assert json.loads((final / "config.json").read_text())["dtype"] == "float16"
    tensors = load_file(final / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    check_replay(run)


@pytest.mark.slow
def test_adapters_travel_and_serve_in_float16(tmp_path: Path, tiny_model: Path) -> None:
    lora = ("lora.rank=4", "lora.alpha=8", "lora.publish=adapters")
    summary, _ = run_smallest(tmp_path, tiny_model, *FLOAT16, *lora)
    assert summary["probe_gap_max"] < TOLERANCE
    check_replay(tmp_path / "smallest")
