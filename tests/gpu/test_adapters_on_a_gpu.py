"""Whole runs on GPUs in which servers are sent the adapters alone."""

import json
import os
from pathlib import Path

import pytest
import torch
from support.fakes.tiny_models import make_model_folder
from support.rigs.adapter_runs import LORA, check
from support.rigs.run_processes import (
    check_ledger,
    copy_environments,
    rows_of,
    run_command,
    write_config,
)

# Rehearses everything without a GPU, in shared memory.
REHEARSAL = "SLIPSTREAM_REHEARSAL" in os.environ

pytestmark = [
    pytest.mark.timeout(420),
    pytest.mark.skipif(not torch.cuda.is_available() and not REHEARSAL, reason="no GPU"),
]
STEPS = 12
SHOWN = ("publishes", "publishes_verified", "published_bytes", "probe_gap_max", "reward_first")
TIMES = ("pause_s", "publish_s", "publish_prepare_s", "publish_receive_s", "publish_load_s")


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
    result = run_command("run", "config.toml", cwd=tmp_path, limit_s=360)
    logs = sorted((tmp_path / "run" / "logs").glob("*.log"))
    if result.returncode != 0:
        for log in logs:
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")
    assert result.returncode == 0, result.stdout + result.stderr
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            if "exported by Megatron-Bridge" in line or "vLLM's loader" in line:
                print(log.name, line)
    rows = [row for row in rows_of(tmp_path / "run") if "weights_bytes" in row]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    note(
        graphs=graphs,
        publish=publish,
        **{name: summary[name] for name in (*SHOWN, "reward_last")},
        gaps=[row["logprob_gap_mean"] for row in rows],
        times={name: [round(row[name], 5) for row in rows] for name in TIMES},
    )
    assert summary["publishes_verified"] == summary["publishes"]
    if publish == "adapters":
        check(tmp_path / "run", item_bytes=2, whole=1, gap=0.05)
    assert summary["reward_last"] > summary["reward_first"]
    check_ledger(summary)


def note(**facts: object) -> None:
    line = json.dumps(facts)
    print(line, flush=True)
    if "OUT" in os.environ:
        with (Path(os.environ["OUT"]) / "adapters.jsonl").open("a") as file:
            print(line, file=file, flush=True)
