"""Sends the numbers of a run, which metrics.jsonl has, to a tracker, or writes them as a table.

    python -m slipstream.extensions.trackers.export_metrics --folder RUN --tracker NAME --out PATH

NAME is `csv` for a table in the file PATH, or a tracker, whose own files are in the folder PATH.
Each call begins a new run at the tracker. The file is read line by line. Prints a line that says
what was sent, or the reason why nothing was.
"""

import argparse
import csv
import io
import itertools
import math
import sys
from collections.abc import Mapping
from pathlib import Path

from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import USAGE_ERROR, ConfigError, SlipstreamError
from slipstream.core.extension import trackers
from slipstream.core.machine.new_file import new_file
from slipstream.core.machine.process import leave
from slipstream.core.run_folder import CONFIG, METRICS
from slipstream.core.settings.measurement_sections import (
    TrackingSection,
    check_trackers,
    tracker_named,
)
from slipstream.learner.controller.reporting.trackers import RunIds, RunTracker, read_rows

TABLE = "csv"
# What a run keeps to itself of an evaluation round: the tracker gets the others.
_OF_ROUND = ("evaluation_step", "wall_s", "num_episodes", "num_failed")


class NewRun(RunIds):
    """Ids for a run that a tracker has not seen: none is read or kept."""

    def keep(self, tracker: str, run_id: str) -> None:
        """Does nothing: the run that goes on keeps its own."""

    def get(self, tracker: str) -> str:
        return ""


def main() -> int:
    """Sends the numbers; returns 2, with the cause on stderr, if nothing was sent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tracker", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        if arguments.tracker == TABLE:
            line = write_table(arguments.folder, arguments.out)
        else:
            line = send(arguments.folder, arguments.tracker, arguments.out)
    except (SlipstreamError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    print(line)
    return 0


def send(folder: Path, name: str, out: Path) -> str:
    """Gives each row of a run to a new run of the tracker; returns a line that says how many.

    Raises ConfigError for an unknown tracker, one whose package or login is missing, a run without
    rows, and numbers of another run in `out`. Errors of the tracker's package rise.
    """
    check_trackers(TrackingSection(trackers=(name,)))
    config = load_config(folder / CONFIG)
    check_rows(folder)
    manifest = trackers().get(name)
    if manifest is not None and manifest.own_folder:
        own_folder = out / manifest.own_folder
        if own_folder.is_dir() and any(own_folder.iterdir()):
            raise ConfigError(
                f"{own_folder} has numbers already, which {name} would show twice: "
                f"remove it, or name another folder by --out"
            )
    ids = NewRun(folder, _ignore)
    opened: RunTracker = tracker_named(name).load()(config, out, ids)
    num_steps = 0
    num_rounds = 0
    for row in read_rows(folder / METRICS, _complain):
        if "step" in row:
            opened.log(int(row["step"]), _finite(row))
            num_steps += 1
        else:
            numbers = {key: value for key, value in row.items() if key not in _OF_ROUND}
            opened.log(int(row["evaluation_step"]), _finite(numbers))
            num_rounds += 1
    opened.close()
    return f"{name} has {num_steps:,} steps and {num_rounds:,} evaluation rounds of {folder}"


def write_table(folder: Path, out: Path) -> str:
    """Writes a column for each metric and a row for each step and round; returns a line.

    A step or round without a number has an empty cell. The file is there whole or not at all.
    Raises ConfigError for a file that is there, and a run without rows.
    """
    check_rows(folder)
    columns: dict[str, None] = {"step": None, "evaluation_step": None}
    num_rows = 0
    for row in read_rows(folder / METRICS, _complain):
        columns.update(dict.fromkeys(row))
        num_rows += 1
    with new_file(out, _complain) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.DictWriter(text, list(columns), restval="")
        writer.writeheader()
        # A run that goes on may have written rows behind those that named the columns.
        for row in itertools.islice(read_rows(folder / METRICS), num_rows):
            writer.writerow(_finite(row))
        # The file stays open for who has opened it.
        text.detach()
    return f"{out} has {num_rows:,} rows and {len(columns):,} columns of {folder}"


def check_rows(folder: Path) -> None:
    """Raises ConfigError if a run has no row of a step or round yet."""
    if next(read_rows(folder / METRICS), None) is None:
        raise ConfigError(f"{folder} has no row in {METRICS}")


def _finite(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if math.isfinite(value)}


def _complain(text: str) -> None:
    print(text)


def _ignore(text: str) -> None:
    """A damaged file of ids does not matter: none is read."""


if __name__ == "__main__":
    leave(main())
