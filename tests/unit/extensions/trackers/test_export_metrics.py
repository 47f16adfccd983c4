"""The numbers of a run go to a tracker, or into a table, after the run."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from slipstream.core.configuration.config_file import dump_config
from slipstream.core.errors import ConfigError
from slipstream.extensions.trackers.export_metrics import send, write_table
from support.fakes.small_configs import small_config

STEP = {
    "step": 1.0,
    "wall_s": 2.0,
    "reward_mean": 0.25,
    "lag_mean": 0.0,
    "lag_max": 0.0,
    "generated_tokens_per_s": 5.0,
    "trained_tokens_per_s": 5.0,
}
ROUND = {
    "evaluation_step": 0,
    "wall_s": 1.0,
    "num_episodes": 4,
    "num_failed": 0,
    "reward_heldout": 0.5,
    "held/reward_mean": 0.5,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    config = small_config(run={"name": "r", "steps": 30})
    (run / "config.toml").write_text(dump_config(config))
    rows = [ROUND, STEP, STEP | {"step": 2.0, "reward_mean": 0.75, "loss": None}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return run


def test_a_table_has_a_column_for_each_metric_and_a_row_for_each_line(
    folder: Path,
) -> None:
    out = folder / "metrics.csv"
    text = write_table(folder, out)
    assert text == f"{out} has 3 rows and 13 columns of {folder}"
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    first_row, _, last_row = rows
    assert (first_row["step"], first_row["evaluation_step"]) == ("", "0.0")
    assert (last_row["step"], last_row["reward_mean"], last_row["loss"]) == (
        "2.0",
        "0.75",
        "",
    )
    with pytest.raises(ConfigError, match=r"metrics\.csv exists already: remove it"):
        write_table(folder, out)
    assert [path.name for path in folder.glob(".*")] == []


def test_a_row_that_comes_meanwhile_is_left_to_the_next_table(
    folder: Path, monkeypatch
) -> None:
    class Growing(csv.DictWriter):
        """The run goes on when the columns are known."""

        def writeheader(self) -> None:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(f"{json.dumps(STEP | {'step': 3.0, 'new': 0.125})}\n")
            super().writeheader()

    monkeypatch.setattr(csv, "DictWriter", Growing)
    assert write_table(folder, folder / "first.csv").split()[2] == "3"
    monkeypatch.undo()
    assert write_table(folder, folder / "second.csv").split()[2] == "4"
    first, second = [
        list(csv.DictReader((folder / f"{name}.csv").read_text().splitlines()))
        for name in ("first", "second")
    ]
    assert [row["step"] for row in first] == ["", "1.0", "2.0"]
    assert [row["new"] for row in second] == ["", "", "", "0.125"]


def test_tensorboard_gets_each_step_and_round(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    out = tmp_path / "out"
    out.mkdir()
    text = send(folder, "tensorboard", out)
    assert text == f"tensorboard has 2 steps and 1 evaluation rounds of {folder}"
    (path,) = (out / "tensorboard").iterdir()
    points: list[Any] = [
        (event.step, value.tag, value.tensor.float_val[0])
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]
    assert (0, "reward/reward_heldout", 0.5) in points
    assert (2, "reward/reward_mean", 0.75) in points
    assert not [tag for _, tag, _ in points if tag.endswith(("loss", "num_failed"))]
    with pytest.raises(
        ConfigError, match=r"has numbers already, which tensorboard would show"
    ):
        send(folder, "tensorboard", out)
    assert [file.name for file in (out / "tensorboard").iterdir()] == [path.name]
    # The ids of the run that goes on are as they were.
    assert not (folder / "tracking.json").exists()


def test_a_run_without_a_row_and_an_unknown_tracker_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'consol', which no installed package gives"):
        send(folder, "consol", folder)
    (folder / "metrics.jsonl").write_text("damaged\n")
    with pytest.raises(ConfigError, match=r"has no row in metrics\.jsonl"):
        write_table(folder, folder / "metrics.csv")
