"""What the learner's benchmark trains, and how it sums up."""

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from slipstream.core.configuration.config_file import load_config
from slipstream.learner.trainer.batches.micro_batch import MicroBatch

from benchmarks.common import measure
from benchmarks.learner import entry_point as learner_entry_point
from benchmarks.learner import loops as learner_loops
from benchmarks.learner import pretrain as learner_pretrain
from benchmarks.learner.throughput import OURS, Turn, rows

ROOT = Path(__file__).parents[3]


def test_table_holds_medians_and_what_they_are_of_peer_and_limit() -> None:
    def turns(*speeds: float, rate: float) -> list[Turn]:
        return [Turn(1e6 / speed, 5.0, speed, rate, 800.0, 70.0) for speed in speeds]

    found = {
        OURS: turns(95, 10, 96, rate=400.0),
        "bare": turns(100, 90, 110, rate=500.0),
        "pretrain": turns(50, 50, 50, rate=250.0),
    }
    assert measure.table(["x"] * 8, rows(found, 0.92))[2:] == [
        "| slipstream | 10,526.3 (10,416.7-100,000.0) | 5.0 | 95 | 0.950 | 400 | 0.500 | 70.0 |",
        "| bare | 10,000.0 (9,090.9-11,111.1) | 5.0 | 100 | 1.000 | 500 | 0.625 | 70.0 |",
        "| pretrain | 20,000.0 (20,000.0-20,000.0) | 5.0 | 50 | 0.500 | 250 | 0.312 | 70.0 |",
        "| limit: matrix product |  |  |  |  | 800.0 (800.0-800.0) | 1.000 |  |",
        "| target |  |  |  | 0.92 |  |  |  |",
    ]


def test_batch_is_as_large_as_the_quickstarts() -> None:
    config = load_config(ROOT / "deploy" / "configs" / "quickstart.toml")
    batch = learner_loops.quickstart_batch(config, 2)
    batch.check(config.algorithm.max_staleness)
    assert len(batch.trajectories) == 256
    assert {len(t.token_ids) for t in batch.trajectories} == {8}


def test_replies_are_lognormal_and_groups_fill_the_micro_batches() -> None:
    load = dataclasses.replace(learner_loops.LOADS["0.6B"], micro_batches=400)
    batch = learner_loops.lognormal_batch(load, 151936, 3)
    batch.check(1)
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


def micro_batch(*lengths: int) -> MicroBatch:
    """Packed sequences; every second token is trained."""
    tokens = sum(lengths)
    places = torch.arange(tokens)
    zeros = torch.zeros(tokens)
    return MicroBatch(
        token_ids=places + 1,
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        targets=places + 2,
        loss_mask=places % 2 == 1,
        loss_weights=zeros,
        advantages=zeros,
        behavior_logprobs=zeros,
        lags=zeros.int(),
        sequence_ids=places,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
        indices=tuple(range(len(lengths))),
    )


def test_pretrain_is_given_the_packed_micro_batches(tmp_path: Path) -> None:
    saved = tmp_path / "saved.pt"
    learner_entry_point.save_micro_batches([micro_batch(3, 5)], saved)
    batch = learner_pretrain.bridge_batch(*torch.load(saved, weights_only=True))
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "tokens": [[1, 2, 3, 4, 5, 6, 7, 8]],
        "labels": [[2, 3, 4, 5, 6, 7, 8, 9]],
        "loss_mask": [[0, 1, 0, 1, 0, 1, 0, 1]],
        "position_ids": [[0, 1, 2, 0, 1, 2, 3, 4]],
        "cu_seqlens": [[0, 3, 8, -1]],
        "cu_seqlens_argmin": [[3]],
        "max_seqlen": [[5]],
    }


def test_pretrain_waits_for_each_turn_and_takes_as_many_steps() -> None:
    orders, answers, settled = iter(["2\n", "1\n"]), io.StringIO(), []
    turns = learner_pretrain.Turns(orders, answers, settle=lambda: settled.append(1))
    steps = 0
    with pytest.raises(SystemExit):
        while True:
            turns.on_train_step_start(None)
            steps += 1
    assert steps == 3
    told = [json.loads(line) for line in answers.getvalue().splitlines()]
    # One line when it is ready, and one for each turn.
    assert len(told) == len(settled) == 3
    assert all(set(one) == {"wall_s", "cpu_s", "peak_gib"} for one in told)


def entry_point(
    folder: Path, text: str, *steps: list[MicroBatch]
) -> learner_entry_point.EntryPoint:
    """Returns an entry point that runs a program `text` in the place of Bridge's loop."""
    script = folder / "program.py"
    script.write_text(text)
    command = [sys.executable, str(script)]
    return learner_entry_point.EntryPoint(folder, steps, folder, command=command)


ECHO = """
import json, os, sys
assert os.environ["WORLD_SIZE"] == "1" and sys.argv[3] == "--batch-size=2"
print(json.dumps({"wall_s": 0, "cpu_s": 0, "peak_gib": 0}), flush=True)
for line in sys.stdin:
    print(json.dumps({"wall_s": 10.0 * int(line), "cpu_s": 1.0, "peak_gib": 2.0}), flush=True)
"""


@pytest.mark.process
def test_turns_are_orders_to_another_process(tmp_path: Path) -> None:
    step = [micro_batch(4), micro_batch(4)]
    process = entry_point(tmp_path, ECHO, step, step)
    try:
        process.wait()
        assert process.turn(2) == learner_entry_point.Spent(20.0, 1.0, 2.0)
        assert process.turn(3).wall_s == 30.0
    finally:
        process.close()


@pytest.mark.process
def test_last_words_of_a_process_that_dies_are_told(tmp_path: Path) -> None:
    process = entry_point(tmp_path, "raise SystemExit('no such package')", [micro_batch(4)])
    try:
        with pytest.raises(RuntimeError, match="ended: no such package"):
            process.wait()
    finally:
        process.close()


def test_steps_of_unequal_micro_batches_are_refused(tmp_path: Path) -> None:
    one = micro_batch(4)
    with pytest.raises(ValueError, match="same number of micro batches, got {1, 2}"):
        entry_point(tmp_path, "", [one], [one, one])
