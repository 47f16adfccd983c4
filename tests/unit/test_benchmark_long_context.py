"""What the benchmark of long sequences trains, and how it sums up."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import long_context
from slipstream.core.models.model_fields import field_problems
from slipstream.learner.trainer.batches.data_checks import check_data


def options(**values: object) -> argparse.Namespace:
    known = {"device": "cpu", "shape": "tiny", "gpus": 2, "tokens": 2048, "memory_fraction": None}
    return argparse.Namespace(**known | values)


def test_the_long_sequence_needs_all_ranks_and_is_beyond_the_original_length(
    tmp_path: Path,
) -> None:
    config = long_context.config_of(options(), tmp_path / "model")
    batch = long_context.batch_of(options(), 1)
    batch.check(config.algorithm.max_staleness)
    check_data(batch, max_tokens=2048, multiple=4, vocab_size=256)
    assert [len(one.token_ids) for one in batch.trajectories] == [2048, 144]
    assert len({one.reward for one in batch.trajectories}) == 2
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert list(field_problems(values)) == []
    assert values["rope_parameters"]["original_max_position_embeddings"] == 512
    assert config.learner.micro_batch_tokens == 1024
    assert config.learner.recompute == "auto"


def test_the_table_has_the_first_step_and_the_median_of_those_with_the_plan() -> None:
    rows = [
        long_context.Row(step, recomputed, seconds, 2048 / seconds, 1.0, peak, planned, 0.5)
        for step, recomputed, seconds, peak, planned in (
            (0, 27, 9.0, 40.0, 0.0),
            (1, 4, 8.0, 61.0, 64.0),
            (2, 4, 2.0, 60.0, 63.0),
            (3, 4, 4.0, 62.0, 63.0),
        )
    ]
    assert long_context.lines_of(rows, 28)[2:] == [
        "| first | 27 of 28 | 9.00 | 228 | 1 | 40.0 | - |",
        "| later | 4 of 28 | 3.00 | 768 | 1 | 62.0 | 63.0 |",
    ]
