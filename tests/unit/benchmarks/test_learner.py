"""What the learner's benchmark trains, and how it sums up."""

import dataclasses
import json
from pathlib import Path

import pytest
from slipstream.core.configuration.config_file import load_config
from slipstream.learner.trainer.batches.batch import check_staleness

from benchmarks.common import measure
from benchmarks.learner import loops as learner_loops
from benchmarks.learner.throughput import OURS, Turn, rows

ROOT = Path(__file__).parents[3]


def test_table_holds_medians_and_what_they_are_of_peer_and_limit() -> None:
    def turns(*speeds: float, rate: float) -> list[Turn]:
        return [Turn(1e6 / speed, 5.0, speed, rate, 800.0, 70.0) for speed in speeds]

    runs = {
        OURS: turns(95, 10, 96, rate=400.0),
        "bare": turns(100, 90, 110, rate=500.0),
    }
    assert measure.table(["x"] * 8, rows(runs, 0.92))[2:] == [
        "| slipstream | 10,526.3 (10,416.7-100,000.0) | 5.0 | 95 | 0.950 | 400 | 0.500 | 70.0 |",
        "| bare | 10,000.0 (9,090.9-11,111.1) | 5.0 | 100 | 1.000 | 500 | 0.625 | 70.0 |",
        "| limit: matrix product |  |  |  |  | 800.0 (800.0-800.0) | 1.000 |  |",
        "| target |  |  |  | 0.92 |  |  |  |",
    ]


def test_batch_is_as_large_as_the_quickstarts() -> None:
    config = load_config(ROOT / "deploy" / "configs" / "quickstart.toml")
    batch = learner_loops.quickstart_batch(config, 2)
    check_staleness(batch, config.algorithm.max_staleness)
    assert len(batch.trajectories) == 256
    assert {len(t.token_ids) for t in batch.trajectories} == {8}


def test_replies_are_lognormal_and_groups_fill_the_micro_batches() -> None:
    load = dataclasses.replace(learner_loops.LOADS["0.6B"], micro_batches=400)
    batch = learner_loops.lognormal_batch(load, 151936, 3)
    check_staleness(batch, 1)
    replies = [t.num_sampled_tokens for t in batch.trajectories]
    mean = sum(replies) / len(replies)
    deviation = (sum((reply - mean) ** 2 for reply in replies) / len(replies)) ** 0.5
    assert mean == pytest.approx(1024, rel=0.05)
    assert deviation / mean == pytest.approx(1.0, abs=0.1)
    tokens = sum(len(t.token_ids) for t in batch.trajectories)
    assert 0.96 < tokens / (400 * 16384) <= 0.97
    assert len(replies) % 8 == 0


@pytest.mark.parametrize("name", list(learner_loops.LOADS))
def test_load_is_of_a_model_that_can_be_configured(name: str, tmp_path: Path) -> None:
    load = learner_loops.LOADS[name]
    config = learner_loops.shape_config(name, load, tmp_path, threads=1)
    assert config.learner.micro_batch_tokens == load.micro_batch_tokens
    sizes = json.loads((tmp_path / "config.json").read_text())
    assert sizes["num_hidden_layers"] == load.layers
