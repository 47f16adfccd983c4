"""Opens the trackers that the settings name."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from pathlib import Path

from pydantic import JsonValue
from slipstream.core.settings.config import Config
from slipstream.learner.controller.events import EventLog, Severity
from slipstream.learner.controller.reporting.result_files import parse_object, write_result
from slipstream.learner.controller.reporting.trackers.tensorboard import TensorBoardTracker
from slipstream.learner.controller.reporting.trackers.tracker import (
    Complain,
    OpenTracker,
    TrackedRun,
    Tracker,
    Trackers,
    told_settings,
)

RUN_IDS = "tracking.json"
# Largest length of an id, in characters.
MAX_ID = 200


class RunIds:
    """The tracking services' ids of this run, in a file, so that a resumed run keeps them."""

    def __init__(self, folder: Path, complain: Complain) -> None:
        """Reads the file. If it is damaged, services begin new runs, with a warning."""
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
        """The id of the run; empty when there is none yet."""
        return self._ids.get(tracker, "")

    def keep(self, tracker: str, run_id: str) -> None:
        """Writes an id into the file; may be called from any thread."""
        with self._lock:
            self._ids[tracker] = run_id
            text = json.dumps(self._ids, indent=2)
            write_result(self._path, f"{text}\n".encode(), self._complain)


def _is_id(value: JsonValue) -> bool:
    """Whether a service may have given this id to a run."""
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_ID


def open_trackers(config: Config, folder: Path, events: EventLog) -> Trackers:
    """Opens the trackers of `config`; their failures become events. Needs the running loop."""
    loop = asyncio.get_running_loop()

    def complain(text: str) -> None:
        loop.call_soon_threadsafe(events.add, text, Severity.WARNING)

    return Trackers(ways_to_open(config, folder, complain), complain)


def ways_to_open(config: Config, folder: Path, complain: Complain) -> dict[str, OpenTracker]:
    """The function that opens each tracker which the settings name."""
    ids = RunIds(folder, complain)
    ways: dict[str, OpenTracker] = {
        "tensorboard": lambda: TensorBoardTracker(folder / "tensorboard", complain),
        "wandb": lambda: _open_wandb(config, folder, ids),
        "mlflow": lambda: _open_mlflow(config, folder, ids),
    }
    return {name: ways[name] for name in config.tracking.trackers}


def _described(config: Config, folder: Path, run_id: str) -> TrackedRun:
    tracking = config.tracking
    return TrackedRun(
        folder=folder,
        project=tracking.project,
        name=config.run.name,
        run_id=run_id,
        settings=told_settings(config),
    )


def _open_wandb(config: Config, folder: Path, ids: RunIds) -> Tracker:
    from slipstream.learner.controller.reporting.trackers.wandb import WandbTracker

    run_id = ids.get("wandb") or secrets.token_hex(8)
    ids.keep("wandb", run_id)
    return WandbTracker(_described(config, folder, run_id))


def _open_mlflow(config: Config, folder: Path, ids: RunIds) -> Tracker:
    from slipstream.learner.controller.reporting.trackers.mlflow import MlflowTracker

    run = _described(config, folder, ids.get("mlflow"))
    tracker = MlflowTracker(run)
    ids.keep("mlflow", tracker.run_id)
    return tracker
