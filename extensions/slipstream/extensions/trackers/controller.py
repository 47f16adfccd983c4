"""Log a run to TensorBoard, Weights & Biases and MLflow; each package is imported by its own."""

import json
import logging
import os
import secrets
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from slipstream.core.settings.config import Config, told_settings
from slipstream.extensions.trackers.mlflow_names import mlflow_names
from slipstream.extensions.trackers.sign_in import sends_nothing
from slipstream.learner.controller.reporting.trackers import Lines, RunIds

# The columns of a table of samples, as the lines name them.
COLUMNS = (
    "step",
    "environment",
    "task_index",
    "prompt",
    "reply",
    "answer",
    "reward",
    "advantage",
    "lag",
    "versions",
    "status",
    "sampled_tokens",
)


def table_rows(episodes: Lines) -> list[list[JsonValue]]:
    """Returns a row of `COLUMNS` for each episode; versions become a text such as `12 by 3`."""
    rows = []
    for line in episodes:
        versions = ", ".join(f"{length} by {version}" for length, version in line["versions"])
        rows.append([versions if name == "versions" else line[name] for name in COLUMNS])
    return rows


# Beginnings of the names of metrics that are about rollout servers and the way to them.
_OF_SERVERS = (
    "servers_",
    "generated_",
    "open_",
    "waiting_",
    "leased_",
    "queue",
    "reserved_",
    "rollout_",
    "drafted_",
    "accepted_",
    "publish_",
    "weights_",
    "stored_",
    "wanted_",
    "ledger_",
)


class TensorBoardTracker:
    """Writes an event file with the package tensorboard, without tensorflow; see `RunTracker`."""

    def __init__(self, config: Config, folder: Path, ids: RunIds) -> None:
        """Creates `tensorboard` in `folder`, and a new file in it."""
        # The package takes its own stand-in for tensorflow, as where there is none.
        sys.modules["tensorboard.compat.notf"] = types.ModuleType("tensorboard.compat.notf")
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # The package is untyped.
        self._writer: Any = EventFileWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = [
            Summary.Value(tag=tag_of(name), simple_value=value) for name, value in values.items()
        ]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=numbers))
        self._writer.add_event(event)
        # A run that is killed leaves what it has told.
        self._writer.flush()

    def samples(self, step: int, episodes: object, groups: object) -> None:
        """Does nothing: TensorBoard has no tables."""

    def close(self) -> None:
        self._writer.close()


def tag_of(name: str) -> str:
    """Returns the tag of a metric, whose part before the slash is a section of TensorBoard."""
    if "/" in name:
        return name
    if "reward" in name:
        return f"reward/{name}"
    if name.endswith("_s") and not name.endswith("_per_s"):
        return f"time/{name}"
    group = "servers" if name.startswith(_OF_SERVERS) else "train"
    return f"{group}/{name}"


# Name of a value that every row of Weights & Biases has and over which all curves are drawn. The
# service's own step numbers must rise, but an evaluation may come after the row of a later step.
STEP = "step"


class WandbTracker:
    """Logs to one run of Weights & Biases, with local files in `wandb/`; see `RunTracker`."""

    def __init__(self, config: Config, folder: Path, ids: RunIds) -> None:
        """Signs in with the key of `wandb login` or WANDB_API_KEY, unless WANDB_MODE is offline."""
        import wandb

        kept_id = ids.get("wandb")
        run_id = kept_id or secrets.token_hex(8)
        ids.keep("wandb", run_id)
        # wandb's run is untyped.
        self._run: Any = wandb.init(
            project=config.tracking.project,
            name=config.run.name,
            id=run_id,
            # Where nothing is sent, the package has a warning for this option.
            resume="allow" if kept_id and not sends_nothing() else None,
            dir=str(folder),
            config=told_settings(config.model_dump(mode="json")),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def samples(self, step: int, episodes: Lines, groups: Lines) -> None:
        """Logs the episodes as a table, and histograms of lengths, surprisal; see `RunTracker`."""
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


# Limits of MLflow: parameters and metrics of one call, characters of one value, and tables whose
# names fit into a tag of 8,000 characters.
MOST_TABLES = 100
# The tag by which MLflow shows artifacts as tables.
TABLES_TAG = "mlflow.loggedArtifacts"
MAX_PARAMS = 100
MAX_METRICS = 1000
MAX_VALUE_CHARACTERS = 500


class MlflowTracker:
    """Logs to one run of the MLflow experiment `tracking.project`; see `RunTracker`."""

    def __init__(self, config: Config, folder: Path, ids: RunIds) -> None:
        """Opens the server or database in MLFLOW_TRACKING_URI, or else mlflow.db in `folder`."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        for package in ("mlflow", "alembic"):
            logging.getLogger(package).setLevel(logging.WARNING)
        database = (folder / "mlflow.db").resolve()
        server = os.environ.get("MLFLOW_TRACKING_URI")
        place = server or f"sqlite:///{database}"
        # MLflow's client is untyped.
        self._client: Any = MlflowClient(tracking_uri=place)
        self._run_id = ids.get("mlflow")
        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
            return
        # Next to our own database file; a server has its own place for artifacts.
        artifacts = (folder / "mlartifacts").resolve()
        own_place = None if server else str(artifacts)
        project = config.tracking.project
        experiment = self._client.get_experiment_by_name(project)
        experiment_id = (
            self._client.create_experiment(project, artifact_location=own_place)
            if experiment is None
            else experiment.experiment_id
        )
        created = self._client.create_run(experiment_id, run_name=config.run.name)
        self._run_id = str(created.info.run_id)
        texts = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in told_settings(config.model_dump(mode="json")).items()
        }
        names = mlflow_names(texts)
        params = [Param(names[key], text[:MAX_VALUE_CHARACTERS]) for key, text in texts.items()]
        for start in range(0, len(params), MAX_PARAMS):
            end = start + MAX_PARAMS
            self._client.log_batch(self._run_id, params=params[start:end])
        ids.keep("mlflow", self._run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        names = mlflow_names(values)
        metrics = [Metric(names[name], value, now_ms, step) for name, value in values.items()]
        for start in range(0, len(metrics), MAX_METRICS):
            end = start + MAX_METRICS
            self._client.log_batch(self._run_id, metrics=metrics[start:end])

    def samples(self, step: int, episodes: Lines, groups: Lines) -> None:
        """Logs the episodes as a table, one artifact for each step; see `RunTracker`."""
        path = f"samples/step-{step:06d}.json"
        table = {"columns": list(COLUMNS), "data": table_rows(episodes)}
        self._client.log_text(self._run_id, json.dumps(table), path)
        run = self._client.get_run(self._run_id)
        tables = json.loads(run.data.tags.get(TABLES_TAG, "[]"))
        tables.append({"path": path, "type": "table"})
        newest = json.dumps(tables[-MOST_TABLES:])
        self._client.set_tag(self._run_id, TABLES_TAG, newest)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
