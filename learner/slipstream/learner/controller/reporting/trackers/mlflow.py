"""The tracker for MLflow."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient
from slipstream.learner.controller.reporting.trackers.tracker import TrackedRun

# Limits of MLflow: parameters and metrics of one call, characters of one value.
MAX_PARAMS = 100
MAX_METRICS = 1000
MAX_VALUE_CHARACTERS = 500
NOT_ALLOWED = re.compile(r"[^\w\-. /]")


class MlflowTracker:
    """One run of an MLflow experiment, named after the project. See `Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        """Opens the server or database of MLFLOW_TRACKING_URI, or else a file of the run."""
        place = os.environ.get("MLFLOW_TRACKING_URI")
        place = place or f"sqlite:///{(run.folder / 'mlflow.db').resolve()}"
        # MLflow's client is untyped.
        self._client: Any = MlflowClient(tracking_uri=place)
        if run.run_id:
            self.run_id = run.run_id
            self._client.update_run(self.run_id, status="RUNNING")
            return
        self.run_id = str(self._create(run))
        texts = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in run.settings.items()
        }
        params = [Param(key, text[:MAX_VALUE_CHARACTERS]) for key, text in texts.items()]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self.run_id, params=params[start : start + MAX_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(NOT_ALLOWED.sub("_", name), value, now_ms, step)
            for name, value in values.items()
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + MAX_METRICS])

    def close(self) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self.run_id)

    def _create(self, run: TrackedRun) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            experiment_id = self._client.create_experiment(run.project)
        else:
            experiment_id = experiment.experiment_id
        created: str = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        return created
