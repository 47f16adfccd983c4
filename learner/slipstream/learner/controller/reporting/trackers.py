"""Opens the trackers that the settings name; each has a thread that passes it the run's numbers.

Consumes: numbers of steps and rounds. Produces: calls of the trackers. Waits for: the next numbers.
Unblocked by: numbers, `close`. Only `close` waits for trackers, and for a limited time.
"""

import asyncio
import json
import logging
import math
import os
import queue
import re
import secrets
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from pydantic import JsonValue
from slipstream.core.settings.config import Config, told_settings
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.reporting.result_files import (
    parse_object,
    write_result,
)

# Takes a warning about a tracker; called on any thread.
Complain: TypeAlias = Callable[[str], None]
MAX_WAITING = 10_000
CLOSE_LIMIT_S = 60.0
log = logging.getLogger(__name__)
# Beginnings of the names of metrics that are about rollout servers and the way to them.
_OF_SERVERS = (
    *("servers_", "generated_", "open_", "waiting_", "leased_", "queue", "reserved_", "rollout_"),
    *("drafted_", "accepted_", "publish_", "weights_", "stored_", "wanted_", "ledger_"),
)
# Lines of trajectories.jsonl or groups.jsonl.
Lines: TypeAlias = Sequence[Mapping[str, Any]]
# The columns of a table of samples, as the lines name them.
COLUMNS = (
    *("step", "environment", "task_index", "prompt", "reply", "answer"),
    *("reward", "advantage", "lag", "versions", "status", "sampled_tokens"),
)


class Tracker(Protocol):
    """A tracking service that logs one run. One thread calls it, and calls may block.

    An error ends this tracker, never the run.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the finite numbers of one step or version."""

    def samples(self, step: int, episodes: Lines, groups: Lines) -> None:
        """Logs some episodes of a step as text, and the numbers of all of its groups."""

    def close(self) -> None:
        """Sends the remaining numbers and closes the tracker."""


# A call of a tracker.
_Entry: TypeAlias = Callable[[Tracker], None]
# Opens a tracker; raises the errors of the tracker's package.
OpenTracker: TypeAlias = Callable[[], Tracker]


class Trackers:
    """All trackers of a run; if a tracker fails, only that tracker ends, with one warning."""

    def __init__(
        self,
        opened: Mapping[str, OpenTracker],
        complain: Complain,
        *,
        close_limit_s: float = CLOSE_LIMIT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """Opens each tracker in its own thread, so that a slow service delays nothing.

        A tracker for which more than `max_waiting` entries wait is abandoned. `complain` gets the
        warnings, on any thread.
        """
        self._close_limit_s, self._complain = close_limit_s, complain
        self._writers = [
            _Writer(name, open_, complain, max_waiting) for name, open_ in opened.items()
        ]
        for writer in self._writers:
            writer.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Gives the finite numbers of one step or version to all trackers."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._put(lambda tracker: tracker.log(step, finite))

    def samples(self, step: int, episodes: Lines, groups: Lines) -> None:
        """Gives the samples of one step to all trackers."""
        self._put(lambda tracker: tracker.samples(step, episodes, groups))

    def _put(self, entry: _Entry) -> None:
        for writer in self._writers:
            writer.put(entry)

    def close(self) -> None:
        """Waits until all trackers have taken all numbers, at most `close_limit_s` in total."""
        until = time.monotonic() + self._close_limit_s
        for writer in self._writers:
            writer.put(None)
        for writer in self._writers:
            writer.join(max(0.0, until - time.monotonic()))
            if writer.is_alive():
                self._complain(
                    f"tracker {writer.name} was not done {self._close_limit_s:g} s after the run"
                )
        self._writers = []


class _Writer(threading.Thread):
    def __init__(self, name: str, open_: OpenTracker, complain: Complain, max_waiting: int) -> None:
        # A service that never answers must not keep the controller alive.
        super().__init__(name=name, daemon=True)
        self._open = open_
        self._complain = complain
        self._entries: queue.Queue[_Entry | None] = queue.Queue(max_waiting)
        self._ended = False

    def put(self, entry: _Entry | None) -> None:
        if self._ended:
            return
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            self._abandon(f"it is {self._entries.maxsize} entries behind")

    def run(self) -> None:
        try:
            tracker = self._open()
            while not self._ended:
                entry = self._entries.get()
                if entry is None:
                    break
                entry(tracker)
            tracker.close()
        except Exception as error:
            log.exception("tracker %s", self.name)
            self._abandon(f"{type(error).__name__}: {str(error).split(chr(10), 1)[0]}")

    def _abandon(self, cause: str) -> None:
        if not self._ended:
            self._ended = True
            self._complain(f"tracker {self.name} gets no more numbers: {cause}")


RUN_IDS = "tracking.json"
# Largest length of an id, in characters.
MAX_ID = 200


class RunIds:
    """The ids of this run at tracking services, kept in a file for a resumed run."""

    def __init__(self, folder: Path, complain: Complain) -> None:
        """Reads the file; if it is damaged, warns and starts without ids.

        The services then begin new runs.
        """
        self._path = folder / RUN_IDS
        self._complain = complain
        self._lock = threading.Lock()
        self._ids: dict[str, str] = {}
        if self._path.is_file():
            found = parse_object(self._path.read_bytes())
            if found is None or not all(_is_id(run_id) for run_id in found.values()):
                found = {}
                complain(f"{self._path} is damaged: trackers begin new runs")
            self._ids = {name: str(run_id) for name, run_id in found.items()}

    def get(self, tracker: str) -> str:
        """Returns the id under which `tracker` logs this run, or "" if it has none yet."""
        return self._ids.get(tracker, "")

    def keep(self, tracker: str, run_id: str) -> None:
        """Writes the run's id at `tracker` into the file; may be called from any thread."""
        with self._lock:
            self._ids[tracker] = run_id
            text = json.dumps(self._ids, indent=2)
            write_result(self._path, f"{text}\n".encode(), self._complain)


def _is_id(value: JsonValue) -> bool:
    """Whether a value can be a tracker's run id: a printable string of limited length."""
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_ID


def open_trackers(config: Config, folder: Path, events: EventLog) -> Trackers:
    """Opens the trackers of `config`; their failures become events. Needs a running event loop."""
    loop = asyncio.get_running_loop()

    def complain(text: str) -> None:
        loop.call_soon_threadsafe(events.warn, text)

    return Trackers(ways_to_open(config, folder, complain), complain)


def ways_to_open(config: Config, folder: Path, complain: Complain) -> dict[str, OpenTracker]:
    """Returns the function that opens each configured tracker, by the tracker's name."""
    ids = RunIds(folder, complain)
    ways: dict[str, OpenTracker] = {
        "tensorboard": lambda: TensorBoardTracker(folder / "tensorboard"),
        "wandb": lambda: WandbTracker(config, folder, ids),
        "mlflow": lambda: MlflowTracker(config, folder, ids),
    }
    return {name: ways[name] for name in config.tracking.trackers}


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
        """Implements `Tracker.log`."""
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
        """Implements `Tracker.close`."""
        self._run.finish()


def table_rows(episodes: Lines) -> list[list[JsonValue]]:
    """Returns a row of `COLUMNS` for each episode; versions become a text such as `12 by 3`."""
    rows = []
    for line in episodes:
        versions = ", ".join(f"{length} by {version}" for length, version in line["versions"])
        rows.append([versions if name == "versions" else line[name] for name in COLUMNS])
    return rows


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
        """Implements `Tracker.log`."""
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
        """Implements `Tracker.close`."""
        self._client.set_terminated(self._run_id)

    def _create(self, project: str, name: str, artifacts: Path | None) -> str:
        experiment = self._client.get_experiment_by_name(project)
        if experiment is None:
            place = str(artifacts.resolve()) if artifacts is not None else None
            experiment_id = self._client.create_experiment(project, artifact_location=place)
        else:
            experiment_id = experiment.experiment_id
        return str(self._client.create_run(experiment_id, run_name=name).info.run_id)


class TensorBoardTracker:
    """Writes an event file with the package tensorboard, without tensorflow; see `Tracker`."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder and a new file in it."""
        # The package takes its own stand-in for tensorflow, as where there is none.
        sys.modules["tensorboard.compat.notf"] = types.ModuleType("tensorboard.compat.notf")
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # The package is untyped.
        self._writer: Any = EventFileWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Implements `Tracker.log`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = [
            Summary.Value(tag=tag_of(name), simple_value=value) for name, value in values.items()
        ]
        summary = Summary(value=numbers)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        # A run that is killed leaves what it has told.
        self._writer.flush()

    def samples(self, step: int, episodes: object, groups: object) -> None:
        """Does nothing: TensorBoard has no tables."""

    def close(self) -> None:
        """Implements `Tracker.close`."""
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
