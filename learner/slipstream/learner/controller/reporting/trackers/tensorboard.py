"""TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.learner.controller.reporting.trackers.event_file import EventFile
from slipstream.learner.controller.reporting.trackers.tracker import TrackedRun


class TensorBoardTracker:
    """Writes into `tensorboard/` of the run's folder; see `Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        self._file = EventFile(run.folder / "tensorboard")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._file.scalars(step, values)

    def close(self) -> None:
        """See `Tracker`."""
        self._file.close()
