"""A start reads the rows behind a stored state, or all of them."""

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from slipstream.learner.controller.reporting.learning import LearningWatch
from slipstream.learner.controller.reporting.row_history import (
    NAME,
    RowHistory,
    open_rows,
    write_rows,
)
from slipstream.learner.controller.reporting.trackers import read_rows
from support.fakes.small_configs import config_of

CONFIG = config_of(Path("r"))


def row_of(step: int) -> dict[str, Any]:
    return {
        "step": float(step),
        "reward_mean": random.random(),
        "reward_min": -random.random(),
        "reward_max": 1.0 + random.random(),
        "lag_mean": 0.0,
        "lag_max": 0.0,
        "generated_tokens_per_s": 1.0,
        "trained_tokens_per_s": None,
        "wall_s": 2.0 * step,
        "step_s": random.random(),
        "training_s": random.random(),
        "logprob_gap_tokens": 4.0,
        "logprob_gap_mean": random.random(),
        "logprob_gap_max": random.random(),
    }


def evaluation_of(version: int) -> dict[str, Any]:
    numbers = {"reward_mean": random.random(), "reward_std": 0.5, "num_episodes": 9}
    row: dict[str, Any] = {
        "evaluation_step": version,
        "wall_s": 2.0 * version + 1.0,
    }
    for name, value in numbers.items():
        row[f"held/{name}"] = value
    return row


def append(folder: Path, *rows: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for row in rows:
            file.write(f"{json.dumps(row)}\n")


def read(folder: Path, tell: Any = pytest.fail) -> tuple[RowHistory, int]:
    """The state of a start, and how many rows it has read."""
    history, begin = open_rows(folder, tell)
    watch = LearningWatch(CONFIG, history.learning)
    number = 0
    for row in read_rows(folder / "metrics.jsonl", tell, begin=begin):
        number += 1
        history.wall_s = max(history.wall_s, row["wall_s"])
        history.noticed.update(notice.name for notice in watch.take(row))
        if "step" in row:
            history.note(row)
    return history, number


def same(first: RowHistory, second: RowHistory) -> bool:
    """Whether two states are equal, where a number that is none is equal to another one."""
    first_text = repr(asdict(first))
    second_text = repr(asdict(second))
    return first_text == second_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 30 steps and three rounds, without the row of step 7; 20 rows are stored."""
    random.seed(3)
    rows: list[dict[str, Any]] = []
    for step in range(1, 31):
        rows.append(row_of(step))
        if step % 10 == 0:
            rows.append(evaluation_of(step))
    del rows[6]
    append(tmp_path, *rows[:20])
    history, number = read(tmp_path)
    assert number == 20
    write_rows(tmp_path, history, pytest.fail)
    append(tmp_path, *rows[20:])
    return tmp_path


def test_a_start_reads_the_rows_behind_the_stored_state(folder: Path) -> None:
    history, number = read(folder)
    assert number == 12
    (folder / "journal" / NAME).unlink()
    expected, number = read(folder)
    assert number == 32
    assert same(history, expected)
    assert expected.newest_version == 30
    assert expected.lacking == {7}
    assert expected.wall_s == 61.0
    without_row = [version for version in range(33) if not history.has_row(version)]
    assert without_row == [0, 7, 31, 32]
    rate = history.newest["trained_tokens_per_s"]
    assert math.isnan(rate)
    assert len(history.facts.first_rewards) == 5
    assert len(history.facts.last_rewards) == 5
    (rounds,) = history.learning.measured.values()
    assert len(rounds) == 3


def test_a_row_that_was_lost_may_come_later(folder: Path) -> None:
    history, _ = read(folder)
    row = row_of(7) | {"trained_tokens_per_s": 0.0}
    history.note(row)
    assert history.has_row(7)
    assert history.newest_version == 30


@pytest.mark.parametrize("size", [0, 1, 19])
def test_a_state_of_other_rows_is_told_and_not_used(folder: Path, size: int) -> None:
    messages: list[str] = []
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:size]))
    _, number = read(folder, messages.append)
    assert number == size
    (message,) = messages
    text = f"{folder / 'journal' / NAME} is not used, and metrics.jsonl is read whole: it is of"
    assert message.startswith(text)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda data: data[:-1], "it is damaged"),
        (lambda data: b"", "it is damaged"),
        (lambda data: data[:60] + b"x" + data[61:], "it is damaged"),
    ],
)
def test_a_damaged_state_is_told_and_not_used(
    folder: Path, change: Any, cause: str
) -> None:
    path = folder / "journal" / NAME
    path.write_bytes(change(path.read_bytes()))
    messages: list[str] = []
    _, number = read(folder, messages.append)
    assert number == 32
    assert messages == [f"{path} is not used, and metrics.jsonl is read whole: {cause}"]


def test_without_metrics_a_state_is_told_and_not_used(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    messages: list[str] = []
    assert same(read(folder, messages.append)[0], RowHistory())
    assert messages[0].endswith("it cannot be read: No such file or directory")


def test_a_state_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    messages: list[str] = []
    write_rows(tmp_path / "gone", RowHistory(), messages.append)
    assert messages == [
        f"{tmp_path / 'gone' / 'metrics.jsonl'} cannot be written, and starts take longer: "
        "No such file or directory"
    ]
