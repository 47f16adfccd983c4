"""Logs to Weights & Biases."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.core.settings.config import Config, told_settings
from slipstream.extensions.trackers.tables import COLUMNS, table_rows
from slipstream.learner.controller.reporting.trackers import Lines, RunIds

# Name of a value that every row of Weights & Biases has and over which all curves are drawn. The
# service's own step numbers must rise, but an evaluation may come after the row of a later step.
STEP = "step"


class WandbTracker:
    """Logs to one run of Weights & Biases, with local files in `wandb/`; see `Tracker`."""

    def __init__(self, config: Config, folder: Path, ids: RunIds) -> None:
        """Signs in with the key of `wandb login` or WANDB_API_KEY, unless WANDB_MODE is offline."""
        import wandb

        run_id = ids.get("wandb") or secrets.token_hex(8)
        ids.keep("wandb", run_id)
        # wandb's run is untyped.
        self._run: Any = wandb.init(
            project=config.tracking.project,
            name=config.run.name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=told_settings(config.model_dump(mode="json")),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def samples(self, step: int, episodes: Lines, groups: Lines) -> None:
        """Logs the episodes as a table, and histograms of lengths and surprisal; see `Tracker`."""
        import wandb

        histograms = {
            name: [value for group in groups for value in group[name] if value is not None]
            for name in ("sampled_tokens", "surprisal")
        }
        drawn = {name: wandb.Histogram(values) for name, values in histograms.items() if values}
        table = wandb.Table(columns=list(COLUMNS), data=table_rows(episodes))
        self._run.log({"samples": table, STEP: step} | drawn)

    def close(self) -> None:
        self._run.finish()
