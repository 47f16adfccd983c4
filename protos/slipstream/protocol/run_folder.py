"""The files of a run's folder beside its journal."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from slipstream.protocol.errors import ConfigError

# Files that a run writes only after its first journal record.
LEFT_BY_A_RUN = ("checkpoints/step-*", "journal/batches/step-*.pb", "metrics.jsonl")


def check_journal_not_lost(folder: Path) -> None:
    """Raises ConfigError when `folder`, whose journal has no record, has files of a run.

    A new run must not begin among them.
    """
    for pattern in LEFT_BY_A_RUN:
        left = next((p for p in folder.glob(pattern) if p.is_dir() or p.stat().st_size), None)
        if left is not None:
            raise ConfigError(
                f"{folder / 'journal' / 'journal.log'} is missing or empty, but the folder holds "
                f"{left.relative_to(folder)} of a run: put the journal back from a copy, remove "
                "the folder, or choose another run.name"
            )


def rename_aside(path: Path) -> Path:
    """Gives `path` the next free name that ends in `.damaged-N`, and returns it."""
    for number in itertools.count(1):
        aside = path.with_name(f"{path.name}.damaged-{number}")
        if not os.path.lexists(aside):
            return path.rename(aside)
    raise AssertionError
