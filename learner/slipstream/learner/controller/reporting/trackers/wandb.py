"""The tracker for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb
from slipstream.learner.controller.reporting.trackers.tracker import TrackedRun

# Name of a value that every row has and over which all curves are drawn. The service's own step
# numbers must rise, but an evaluation may come after the row of a later step.
STEP = "step"


class WandbTracker:
    """One run of a project; offline it is kept in `wandb/` of the run folder. See `Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        """Signs in with the key of `wandb login` or WANDB_API_KEY, unless WANDB_MODE is offline."""
        # wandb's run is untyped.
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({**values, STEP: step})

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()
