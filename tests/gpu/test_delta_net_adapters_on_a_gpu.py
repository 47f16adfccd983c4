"""A whole run on a GPU in which three environments train adapters of their own on delta nets."""

import os
from pathlib import Path

import pytest
import torch
from support.fakes.field_models import make_delta_net_model
from support.rigs.gpu_records import note
from support.rigs.run_processes import (
    checked,
    copy_environments,
    rows_of,
    run_with_logs,
    write_config,
)

# Rehearses everything without a GPU, in shared memory.
REHEARSAL = "SLIPSTREAM_REHEARSAL" in os.environ

pytestmark = [
    pytest.mark.timeout(480),
    pytest.mark.skipif(
        not torch.cuda.is_available() and not REHEARSAL, reason="no GPU"
    ),
]
NAMES = ("first", "second", "third")
STEPS = 24
# Heads of keys and values as Qwen3.5-4B has them, in a narrower model.
WIDTH = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
SHOWN = (
    "publishes",
    "publishes_verified",
    "probe_gap_max",
    "reward_first",
    "reward_last",
)


def environment(name: str) -> dict[str, object]:
    return {
        "name": name,
        "reference": "slipstream.environments.echo:Echo",
        "args": {"num_symbols": 8, "reply_length": 2},
        "adapter": name,
        "timeout_s": 10.0,
    }


@pytest.mark.parametrize("has_graphs", [False, True])
def test_three_adapters_on_delta_nets_learn_side_by_side(
    has_graphs: bool, tmp_path: Path
) -> None:
    model = make_delta_net_model(tmp_path, **({} if REHEARSAL else WIDTH))
    write_config(
        copy_environments(tmp_path),
        model,
        run__steps=STEPS,
        model__dtype="bfloat16",
        lora={"rank": 16, "publish": "adapters", "adapters": list(NAMES)},
        environments=[environment(name) for name in NAMES],
        evaluations=[],
        algorithm__learning_rate=3e-3,
        rollout_server__enforce_eager=not has_graphs or REHEARSAL,
        rollout_server__gpu_memory_utilization=0.2,
        # FlashInfer's kernel is compiled for minutes first.
        rollout_server__engine={} if REHEARSAL else {"gdn_prefill_backend": "triton"},
        weights__verify_every=1,
        weights__join_deadline_s=60.0,
    )
    run_with_logs(tmp_path, limit_s=420)
    summary = checked(tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    gaps = [row["logprob_gap_mean"] for row in rows if "logprob_gap_mean" in row]
    note(
        "delta_net_adapters",
        has_graphs=has_graphs,
        gap_largest=max(gaps),
        **{name: summary[name] for name in SHOWN},
    )
    assert summary["publishes_verified"] == summary["publishes"] > 2
    assert max(gaps) < 0.05
    assert summary["reward_last"] > summary["reward_first"]
