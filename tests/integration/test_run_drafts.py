"""A whole run whose servers draft with a layer that is trained beside the policy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.extensions.drafts.shape import DraftShape
from support.references.plain_drafts import kept_counts
from support.rigs import stock_drafts
from support.rigs.run_processes import LONG_RUN, check_replay, succeed
from support.rigs.smallest_run import run_smallest
from transformers import AutoModelForCausalLM

pytestmark = [*LONG_RUN, pytest.mark.timeout(600)]
TOKENS = 2
SETTINGS = (
    "model.dtype=float32",
    f"drafts.tokens={TOKENS}",
    "drafts.learning_rate=0.01",
    "checkpoint.every_steps=2",
)


def check_stock_vllm(model: Path) -> None:
    """vLLM drafts with an exported layer what the learner's computes; replies are the model's."""
    program = [sys.executable, stock_drafts.__file__, model, model / "draft", TOKENS]
    done = subprocess.run(
        [*map(str, program)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parsed = json.loads(done.stdout.splitlines()[-1])
    assert parsed["alone"] == parsed["drafted"]
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    shape = DraftShape.of(read_model_sizes(model))
    layer = load_file(model / "draft" / "model.safetensors")
    counts: list[int] = []
    for prompt, reply in zip(stock_drafts.PROMPTS, parsed["drafted"], strict=True):
        tokens = [*prompt, *reply]
        counts += kept_counts(
            policy, shape, layer, tokens, first=len(prompt), num_tokens=TOKENS
        )
    # Drafts at a reply's end may reach beyond it.
    at_the_end = (TOKENS + 1) * len(stock_drafts.PROMPTS)
    assert sum(counts) > 0
    assert 0 <= parsed["accepted"] - sum(counts) <= at_the_end
    assert 0 <= parsed["draft"] - TOKENS * len(counts) <= 2 * at_the_end


def test_a_resumed_run_goes_on_with_the_layer_that_it_had(
    tmp_path: Path, tiny_model: Path
) -> None:
    summary, _ = run_smallest(tmp_path, tiny_model, *SETTINGS, "run.steps=3")
    assert summary["probe_gap_max"] < 1e-3
    again, rows = run_smallest(tmp_path, tiny_model, *SETTINGS, "run.steps=5")
    assert (again["steps"], again["ledger"]["lost"]) == (5, 0)
    assert again["logprob_gap_mean"] < 1e-4
    assert all(
        {"draft_loss_1", "draft_loss_2", "drafts_s"} <= row.keys() for row in rows
    )
    assert all(row["draft_refused_updates"] == 0 for row in rows)
    run = tmp_path / "smallest"
    # An export checks what it loads by the digest of all published weights.
    final = run / "checkpoints" / "final"
    older = tmp_path / "older"
    exported = tmp_path / "model"
    succeed("export", run, "--out", exported, limit_s=200)
    for name in ("model.safetensors", "draft/model.safetensors", "draft/config.json"):
        assert (exported / name).read_bytes() == (final / name).read_bytes()
    succeed("export", run, "--step", 4, "--out", older, limit_s=200)
    first, last = (
        load_file(folder / "draft" / "model.safetensors") for folder in (older, final)
    )
    assert all(not torch.equal(first[name], last[name]) for name in last)
    check_stock_vllm(exported)
    # The digests are those of all published weights, the layer's among them.
    check_replay(run)
    # A further run begins with the layer, which such a rate leaves as it is.
    overrides = ("drafts.learning_rate=1e-30", "run.name=further", "run.steps=1")
    run_smallest(tmp_path, exported, *SETTINGS[:2], *overrides)
    further = load_file(
        tmp_path / "further" / "checkpoints" / "final" / "draft/model.safetensors"
    )
    assert all(torch.equal(further[name], last[name]) for name in last)
