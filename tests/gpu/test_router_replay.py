"""vLLM's experts on a GPU, replayed by TransformerEngine's learner on the same one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.ranks.parity_layouts import PARITY_STEPS, batches, config_of
from support.ranks.rank_pool import RankPool
from support.references.plain_policy import PlainPolicy
from support.rigs import parity_run, router_replay_run

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("mode", [["--eager"], []], ids=["eager", "graphs"])
def test_replay_narrows_the_gap_of_the_logprobs(
    mode: list[str], tmp_path: Path
) -> None:
    program = [
        sys.executable,
        router_replay_run.__file__,
        "--out",
        str(tmp_path),
        *mode,
    ]
    subprocess.run(program, check=True, timeout=900)
    parsed = json.loads((tmp_path / "result.json").read_text())
    assert parsed["device"] == "cuda"
    assert parsed["routing_difference"] > 0


def test_replay_trains_like_plain_transformers(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    name = "one-replay-moe"
    parity_run.compare(rank_pool, tmp_path, 1, "float32", [name])
    stored = torch.load(tmp_path / f"{name}.pt", weights_only=True)["metrics"]
    plain = PlainPolicy(tmp_path / "moe", config_of(name, tmp_path))
    for ours, batch in zip(stored, batches(plain.config)[:PARITY_STEPS], strict=True):
        theirs = plain.step(batch)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
        assert ours["routing_difference"] == pytest.approx(
            theirs["routing_difference"], abs=1e-2
        )
