"""Whole runs in which learner and engine agree in every bit."""

from pathlib import Path

import pytest
from support.rigs.smallest_run import run_smallest

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("nothing_survives"),
]
BFLOAT16 = ("run.steps=4", "model.dtype=bfloat16", "weights.verify_every=1")


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_no_token_of_the_same_weights_has_other_bits(tmp_path, tiny_model, max_staleness):
    summary, rows = run_smallest(
        tmp_path,
        tiny_model,
        *BFLOAT16,
        "algorithm.agreement=bits",
        f"algorithm.max_staleness={max_staleness}",
    )
    assert sum(row["logprob_gap_tokens"] for row in rows) > 0
    assert [row["logprob_unequal_tokens"] for row in rows] == [0] * 4
    assert max(row["logprob_gap_max"] for row in rows) == 0
    assert summary["probe_gap_max"] == 0


@pytest.mark.slow
def test_without_it_nearly_all_tokens_have_other_bits(tmp_path: Path, tiny_model: Path) -> None:
    _, rows = run_smallest(tmp_path, tiny_model, *BFLOAT16, "algorithm.max_staleness=0")
    differ = sum(row["logprob_unequal_tokens"] for row in rows)
    assert differ > 0.5 * sum(row["logprob_gap_tokens"] for row in rows)
