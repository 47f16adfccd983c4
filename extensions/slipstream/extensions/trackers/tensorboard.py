"""Writes files that TensorBoard shows."""

import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.core.settings.config import Config
from slipstream.learner.controller.reporting.trackers import RunIds

# Beginnings of the names of metrics that are about rollout servers and the way to them.
_OF_SERVERS = (
    *("servers_", "generated_", "open_", "waiting_", "leased_", "queue", "reserved_", "rollout_"),
    *("drafted_", "accepted_", "publish_", "weights_", "stored_", "wanted_", "ledger_"),
)


class TensorBoardTracker:
    """Writes an event file with the package tensorboard, without tensorflow; see `Tracker`."""

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
        summary = Summary(value=numbers)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
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
