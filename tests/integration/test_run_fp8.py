"""A whole run whose engine keeps its linear layers in FP8."""

import pytest
from support.rigs.smallest_run import plain_engine, run_smallest

__all__ = ["plain_engine"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("nothing_survives", "plain_engine"),
]
STEPS = 5


def test_a_run_quantises_what_it_publishes_and_corrects_the_gap(tmp_path, tiny_model):
    summary, rows = run_smallest(
        tmp_path,
        tiny_model,
        f"run.steps={STEPS}",
        "model.dtype=bfloat16",
        "rollout_server.quantization=fp8_per_channel",
        "algorithm.max_staleness=0",
        "algorithm.learning_rate=1e-5",
        "weights.verify_every=1",
    )
    print(summary["probe_gap_max"], summary["logprob_gap_mean"], summary["logprob_gap_max"])
    # vLLM's loader quantises each version.
    assert [row["publish_copied"] for row in rows] == STEPS * [0]
    # Every token has lag 0; what is left is rounding, more than bfloat16's.
    assert 1e-4 < summary["logprob_gap_mean"] < 0.1
    assert 1e-3 < summary["probe_gap_max"] < 0.5
