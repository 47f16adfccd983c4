"""Whole runs on GPUs in which servers are sent the adapters alone."""

import os
from pathlib import Path

import pytest
import torch
from slipstream.learner.trainer.tiny_model import SPECIAL_TOKENS, WORDS
from support.fakes.tiny_models import make_model_folder
from support.rigs.gpu_records import note
from support.rigs.run_processes import (
    checked,
    copy_environments,
    rows_of,
    run_with_logs,
    summary_of,
    write_config,
)

# Rehearses everything without a GPU, in shared memory.
REHEARSAL = "SLIPSTREAM_REHEARSAL" in os.environ

pytestmark = [
    pytest.mark.timeout(420),
    pytest.mark.skipif(
        not torch.cuda.is_available() and not REHEARSAL, reason="no GPU"
    ),
]
STEPS = 12
RANK = 8
LAYERS = 2
# The shape that `make_model_folder` makes: 2 heads and one pair of keys and values of 32.
HIDDEN = 64
MLP = 192
HEADS = 64
KEYS = 32
# Outputs and inputs of the seven matrices of a layer.
MATRICES = [
    (HEADS, HIDDEN),
    (KEYS, HIDDEN),
    (KEYS, HIDDEN),
    (HIDDEN, HEADS),
    (MLP, HIDDEN),
    (MLP, HIDDEN),
    (HIDDEN, MLP),
]
ADAPTERS = LAYERS * sum(RANK * (outputs + inputs) for outputs, inputs in MATRICES)
VOCABULARY = len(SPECIAL_TOKENS) + len(WORDS)
ALL = (
    2 * VOCABULARY * HIDDEN
    + LAYERS * (sum(outputs * inputs for outputs, inputs in MATRICES) + 2 * HIDDEN)
    + HIDDEN
)
LORA = {"rank": RANK, "alpha": 32.0, "publish": "adapters"}
SHOWN = (
    "publishes",
    "publishes_verified",
    "published_bytes",
    "probe_gap_max",
    "reward_first",
)
TIMES = (
    "pause_s",
    "publish_s",
    "publish_prepare_s",
    "publish_receive_s",
    "publish_load_s",
)


def check(run: Path, *, item_bytes: int, whole: int, gap: float) -> None:
    """`whole` publishes had matrices and adapters, the others adapters."""
    summary = summary_of(run)
    rows = [row for row in rows_of(run) if "weights_bytes" in row]
    alone = ADAPTERS * item_bytes
    both = (ALL + ADAPTERS) * item_bytes
    assert {row["weights_bytes"] for row in rows} <= {alone, both}
    expected = whole * both + (summary["publishes"] - whole) * alone
    assert summary["published_bytes"] == expected, (summary["publishes"], whole)
    assert summary["publishes"] > 2
    assert summary["publishes_verified"] >= whole
    assert summary["probe_gap_max"] <= gap
    assert summary["logprob_gap_mean"] <= gap


@pytest.mark.parametrize(
    ("graphs", "publish"), [(False, "adapters"), (True, "adapters"), (True, "merged")]
)
def test_a_run_sends_adapters_alone(graphs: bool, publish: str, tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model")
    write_config(
        copy_environments(tmp_path),
        model,
        run__steps=STEPS,
        model__dtype="bfloat16",
        lora=LORA | {"publish": publish},
        evaluations=[],
        algorithm__learning_rate=5e-3,
        algorithm__max_staleness=1,
        rollout_server__enforce_eager=not graphs or REHEARSAL,
        rollout_server__gpu_memory_utilization=0.2,
        weights__transport="ipc",
        weights__verify_every=1,
        weights__join_deadline_s=60.0,
    )
    run_with_logs(tmp_path, limit_s=360)
    for log in sorted((tmp_path / "run" / "logs").glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            if "exported by Megatron-Bridge" in line or "vLLM's loader" in line:
                print(log.name, line)
    rows = [row for row in rows_of(tmp_path / "run") if "weights_bytes" in row]
    summary = checked(tmp_path / "run")
    note(
        "adapters",
        graphs=graphs,
        publish=publish,
        **{name: summary[name] for name in (*SHOWN, "reward_last")},
        gaps=[row["logprob_gap_mean"] for row in rows if "logprob_gap_mean" in row],
        times={name: [round(row[name], 5) for row in rows] for name in TIMES},
    )
    assert summary["publishes_verified"] == summary["publishes"]
    if publish == "adapters":
        check(tmp_path / "run", item_bytes=2, whole=1, gap=0.05)
    assert summary["reward_last"] > summary["reward_first"]
