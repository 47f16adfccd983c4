"""The lines of metrics.jsonl, one after the other: a long run has more of them than fit memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from slipstream.learner.controller.records.journal import whole_bytes

METRICS = "metrics.jsonl"
SAMPLES = "trajectories.jsonl"


def cut_torn_line(path: Path) -> None:
    """Takes away the last line of a file if a crash tore it."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(whole_bytes(path))


def read_rows(path: Path) -> Iterator[dict[str, float]]:
    """The numbers of each line; none when there is no such file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            row = json.loads(line)
            yield {name: math.nan if v is None else v for name, v in row.items()}
