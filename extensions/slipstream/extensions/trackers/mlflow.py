"""Logs to MLflow."""

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.core.settings.config import Config, told_settings
from slipstream.extensions.trackers.tables import COLUMNS, table_rows
from slipstream.learner.controller.reporting.trackers import Lines, RunIds

# Limits of MLflow: parameters and metrics of one call, characters of one value, and tables whose
# names fit into a tag of 8,000 characters.
MOST_TABLES = 100
# The tag by which MLflow shows artifacts as tables.
TABLES_TAG = "mlflow.loggedArtifacts"
MAX_PARAMS = 100
MAX_METRICS = 1000
MAX_VALUE_CHARACTERS = 500
NOT_ALLOWED = re.compile(r"[^\w\-. /]")


class MlflowTracker:
    """Logs to one run of the MLflow experiment `tracking.project`; see `Tracker`."""

    def __init__(self, config: Config, folder: Path, ids: RunIds) -> None:
        """Opens the server or database in MLFLOW_TRACKING_URI, or else mlflow.db in `folder`."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        place = os.environ.get("MLFLOW_TRACKING_URI")
        place = place or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        # MLflow's client is untyped.
        self._client: Any = MlflowClient(tracking_uri=place)
        self._run_id = ids.get("mlflow")
        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
            return
        # Next to our own database file; a server has its own place for artifacts.
        artifacts = None if os.environ.get("MLFLOW_TRACKING_URI") else folder / "mlartifacts"
        self._run_id = self._create(config.tracking.project, config.run.name, artifacts)
        texts = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in told_settings(config.model_dump(mode="json")).items()
        }
        params = [Param(key, text[:MAX_VALUE_CHARACTERS]) for key, text in texts.items()]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])
        ids.keep("mlflow", self._run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(NOT_ALLOWED.sub("_", name), value, now_ms, step)
            for name, value in values.items()
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MAX_METRICS])

    def samples(self, step: int, episodes: Lines, groups: Lines) -> None:
        """Logs the episodes as a table, one artifact for each step; see `Tracker`."""
        path = f"samples/step-{step:06d}.json"
        table = {"columns": list(COLUMNS), "data": table_rows(episodes)}
        self._client.log_text(self._run_id, json.dumps(table), path)
        tables = json.loads(self._client.get_run(self._run_id).data.tags.get(TABLES_TAG, "[]"))
        tables = [*tables, {"path": path, "type": "table"}][-MOST_TABLES:]
        self._client.set_tag(self._run_id, TABLES_TAG, json.dumps(tables))

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _create(self, project: str, name: str, artifacts: Path | None) -> str:
        experiment = self._client.get_experiment_by_name(project)
        if experiment is None:
            place = str(artifacts.resolve()) if artifacts is not None else None
            experiment_id = self._client.create_experiment(project, artifact_location=place)
        else:
            experiment_id = experiment.experiment_id
        return str(self._client.create_run(experiment_id, run_name=name).info.run_id)
