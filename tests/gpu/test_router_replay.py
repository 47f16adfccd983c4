"""vLLM's experts on a GPU, replayed by TransformerEngine's learner on the same one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import router_replay_run
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("mode", [["--eager"], []], ids=["eager", "graphs"])
def test_replay_narrows_the_gap_of_the_logprobs(mode: list[str], tmp_path: Path) -> None:
    program = [sys.executable, router_replay_run.__file__, "--out", str(tmp_path), *mode]
    subprocess.run(program, check=True, timeout=900)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["device"] == "cuda"
    assert found["routing_difference"] > 0
