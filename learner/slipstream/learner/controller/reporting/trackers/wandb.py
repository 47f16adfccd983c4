"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import wandb
from slipstream.learner.controller.reporting.trackers.tracker import TrackedRun

# A value that every line has, and all curves are drawn over: evaluations come later than the step
# after theirs, and the service takes its own step numbers in order only.
STEP = "step"


class WandbTracker:
    """One run of a project; offline it lies in `wandb/` of the run's folder. See `Tracker`."""

    def __init__(self, run: TrackedRun, *, mode: Literal["online", "offline"]) -> None:
        """Signs in as `wandb login` or WANDB_API_KEY say."""
        # What it gives is untyped for us.
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({**values, STEP: step})

    def check(self) -> None:
        """See `Tracker`: what it writes is its own concern."""

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()
