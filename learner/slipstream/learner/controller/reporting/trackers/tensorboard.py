"""The tracker for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.learner.controller.reporting.result_files import Tell
from slipstream.learner.controller.reporting.trackers.event_file import EventFile
from slipstream.learner.controller.reporting.trackers.tracker import TrackedRun


class TensorBoardTracker:
    """Writes into `tensorboard/` of the run's folder; see `Tracker`."""

    def __init__(self, run: TrackedRun, tell: Tell) -> None:
        """`tell` gets warnings about files that vanish or cannot be written."""
        self._file = EventFile(run.folder / "tensorboard", tell)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._file.scalars(step, values)

    def close(self) -> None:
        """See `Tracker`."""
        self._file.close()
