"""A whole run whose servers draft with a layer that is trained beside the policy."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.rigs.run_processes import succeed
from support.rigs.smallest_run import run_smallest

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("nothing_survives"),
]
SETTINGS = (
    "model.dtype=float32",
    "drafts.tokens=2",
    "drafts.learning_rate=0.01",
    "checkpoint.every_steps=2",
)


def test_a_resumed_run_goes_on_with_the_layer_that_it_had(tmp_path: Path, tiny_model: Path) -> None:
    summary, _ = run_smallest(tmp_path, tiny_model, *SETTINGS, "run.steps=3")
    assert summary["probe_gap_max"] < 1e-3
    again, rows = run_smallest(tmp_path, tiny_model, *SETTINGS, "run.steps=5")
    assert (again["steps"], again["ledger"]["lost"]) == (5, 0)
    assert again["logprob_gap_mean"] < 1e-4
    assert all({"draft_loss_1", "draft_loss_2", "drafts_s"} <= row.keys() for row in rows)
    assert all(row["draft_refused_updates"] == 0 for row in rows)
    run = tmp_path / "smallest"
    assert "faults: 0" in succeed("verify", run, limit_s=100).stdout
    # An export checks what it loads by the digest of all published weights, and has the policy.
    exported, final = tmp_path / "model", run / "checkpoints" / "final"
    succeed("export", run, "--out", exported, limit_s=200)
    ours, expected = (load_file(each / "model.safetensors") for each in (exported, final))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())
    # The digests are those of all published weights, the layer's among them.
    assert succeed("replay", run, limit_s=200).stdout.count("as recorded") == 5
