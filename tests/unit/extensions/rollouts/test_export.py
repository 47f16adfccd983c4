"""Rollouts of whole runs of fakes as data sets, and runs of which nothing is written."""

import asyncio
import json
import shutil
import statistics
from pathlib import Path

import pytest
from slipstream.client.run_folder import write_config
from slipstream.core.errors import ConfigError
from slipstream.extensions.rollouts.export_rollouts import (
    RolloutSelection,
    export_rollouts,
    main,
    ranges,
)
from slipstream.learner.controller.records.journal import batch_path
from support.fakes.chat_models import make_chat_model
from support.rigs.batch_messages import stored_batch
from support.rigs.controller_runs import make_config, play
from support.rigs.run_processes import records_of

STEPS = 4
ALL = RolloutSelection()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_chat_model(folder / "model", with_weights=False)
    config = make_config(
        folder,
        model__path=str(folder / "model"),
        run__steps=STEPS,
    )
    asyncio.run(play(config))
    write_config(config, config.run_dir)
    return config.run_dir


@pytest.fixture
def run_copy(whole_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_run, tmp_path / "copy"))


def rows_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def batch_records(run: Path) -> list[dict]:
    return [record for record in records_of(run) if record["kind"] == "batch"]


def steps_in(path: Path) -> set[int]:
    return {row["step"] for row in rows_in(path)}


def batches_of(run: Path) -> dict[int, Path]:
    """The batch files by their steps, counted from 1."""
    journal = run / "journal"
    return {
        record["step"] + 1: batch_path(journal, record["step"])
        for record in batch_records(run)
    }


def test_each_trained_episode_is_a_row(whole_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.jsonl"
    lines = export_rollouts(whole_run, out, ALL)
    rows = rows_in(out)
    assert lines[0] == f"{out} has {len(rows)} rollouts of steps 1 to {STEPS}"
    remaining = iter(rows)
    for record in batch_records(whole_run):
        batch = stored_batch(whole_run / "journal", record)
        for message in batch.trajectories:
            row = next(remaining)
            assert row["step"] == record["step"] + 1
            assert row["group_id"] == message.group_id
            assert row["member"] == message.member
            assert row["reward"] == message.reward
    assert not list(remaining)


def test_a_parquet_file_has_the_rows_of_a_file_of_lines(
    whole_run: Path, tmp_path: Path
) -> None:
    from pyarrow import parquet

    lines_file = tmp_path / "all.jsonl"
    table_file = tmp_path / "all.parquet"
    export_rollouts(whole_run, lines_file, ALL)
    export_rollouts(whole_run, table_file, ALL)
    table = parquet.read_table(table_file)
    rows = table.to_pylist()
    for row in rows:
        for message in row["messages"] or []:
            # A line leaves fields without a value out.
            if message["weight"] is None:
                del message["weight"]
    assert rows == rows_in(lines_file)


def test_steps_and_rewards_choose_rows(whole_run: Path, tmp_path: Path) -> None:
    every_row = tmp_path / "all.jsonl"
    some_rows = tmp_path / "some.jsonl"
    export_rollouts(whole_run, every_row, ALL)
    rows = rows_in(every_row)
    lowest_reward = statistics.median_high(row["reward"] for row in rows)
    choice = RolloutSelection(
        first_step=2,
        last_step=3,
        min_reward=lowest_reward,
    )
    export_rollouts(whole_run, some_rows, choice)
    expected_rows = [
        row for row in rows if 2 <= row["step"] <= 3 and row["reward"] >= lowest_reward
    ]
    assert rows_in(some_rows) == expected_rows


@pytest.mark.parametrize(
    ("name", "choice", "cause"),
    [
        ("out.csv", ALL, r"as \.parquet or \.jsonl, got .*out\.csv"),
        (
            "out.jsonl",
            RolloutSelection(first_step=5),
            "--steps names none of the trained steps .*, 1 to 4",
        ),
        (
            "out.jsonl",
            RolloutSelection(min_reward=1e5),
            "no rollout of steps 1 to 4 has a reward of 100000",
        ),
        (
            "out.parquet",
            RolloutSelection(min_reward=1e5),
            "choose a lower --min-reward",
        ),
    ],
)
def test_a_choice_of_nothing_is_refused_and_nothing_is_written(
    name: str, choice: RolloutSelection, cause: str, whole_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / name
    with pytest.raises(ConfigError, match=cause):
        export_rollouts(whole_run, out, choice)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_stays_as_it_was(whole_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        export_rollouts(whole_run, out, ALL)
    assert out.read_text() == "mine"


def test_removed_batches_are_named_with_the_steps_that_are_left(
    run_copy: Path, tmp_path: Path
) -> None:
    batches = batches_of(run_copy)
    batches[1].unlink()
    batches[2].unlink()
    out = tmp_path / "out.jsonl"
    cause = r"no batches of steps 1 to 2: .*choose --steps 3:4"
    with pytest.raises(ConfigError, match=cause):
        export_rollouts(run_copy, out, ALL)
    export_rollouts(run_copy, out, RolloutSelection(first_step=3))
    assert steps_in(out) == {3, 4}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_damaged_batch_leaves_no_file(
    suffix: str, run_copy: Path, tmp_path: Path
) -> None:
    damaged = batches_of(run_copy)[3]
    data = bytearray(damaged.read_bytes())
    data[-20] ^= 1
    damaged.write_bytes(data)
    out = tmp_path / f"out{suffix}"
    with pytest.raises(ConfigError, match="the batch of step 3 of .* is damaged"):
        export_rollouts(run_copy, out, ALL)
    assert list(tmp_path.glob("*out*")) == []


def test_steps_without_a_version_are_left_out(run_copy: Path, tmp_path: Path) -> None:
    log = run_copy / "journal" / "journal.log"
    lines = log.read_bytes().splitlines(keepends=True)
    records = records_of(run_copy)
    last_step = max(
        place for place, record in enumerate(records) if record["kind"] == "step"
    )
    shorter = b"".join(lines[:last_step])
    log.write_bytes(shorter)
    out = tmp_path / "out.jsonl"
    export_rollouts(run_copy, out, ALL)
    assert steps_in(out) == {1, 2, 3}


def test_the_program_says_why_nothing_was_written(
    whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    out = tmp_path / "out.txt"
    options = [f"--folder={whole_run}", f"--out={out}"]
    monkeypatch.setattr("sys.argv", ["export", *options])
    assert main() == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("slipstream: rollouts are written as .parquet or")


def test_ranges_name_each_step_once() -> None:
    assert ranges([1, 2, 3, 7, 9, 10]) == "1 to 3, 7, 9 to 10"
