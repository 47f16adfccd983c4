"""TensorBoard's event files."""

from __future__ import annotations

import time
from collections.abc import Mapping

from slipstream.learner.controller.trackers.tracker import TrackedRun
from tensorboardX import SummaryWriter


class TensorBoardTracker:
    """Writes into `tensorboard/` of the run's folder; see `Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        # Without it a run that is resumed within the second would write over its own file.
        suffix = f".{time.time_ns()}"
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), filename_suffix=suffix)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()
