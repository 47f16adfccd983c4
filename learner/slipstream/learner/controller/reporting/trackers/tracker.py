"""The interface of trackers, and the facts about a run that they get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue
from slipstream.core.settings.config import Config

# Settings that hold or locate secrets, which no tracking service should get.
_UNTOLD = (
    "queue.redis_url",
    "queue.redis_password_file",
    "queue.controller",
    "queue.rollout_server",
    "security",
)


class Tracker(Protocol):
    """Takes the numbers of one run; called from one thread, and may block.

    An error ends the tracker, never the run.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the finite numbers of one step or version."""
        ...

    def check(self) -> None:
        """Checks the tracker's files; called every few seconds while no numbers come."""
        ...

    def close(self) -> None:
        """Sends the numbers that are left."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run for a tracking service.

    `run_id` is the service's own id of the run and stays the same when the run is resumed. It is
    empty when the service must draw one.
    """

    folder: Path
    project: str
    name: str
    run_id: str
    settings: Mapping[str, JsonValue]


def told_settings(config: Config) -> dict[str, JsonValue]:
    """All settings but secrets, by flat names like `algorithm.max_staleness`."""
    flat: dict[str, JsonValue] = {}

    def flatten(prefix: str, value: JsonValue) -> None:
        if prefix in _UNTOLD:
            return
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                flatten(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    flatten("", config.model_dump(mode="json"))
    return flat
