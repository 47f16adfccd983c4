"""What a tracker is, and what it is told about its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue
from slipstream.protocol.settings.config import Config

# Secrets, and where they lie: nothing that a tracking service should hold.
_UNTOLD = (
    "queue.redis_url",
    "queue.redis_password_file",
    "queue.controller",
    "queue.rollout_server",
    "security",
)


class Tracker(Protocol):
    """Takes the numbers of one run; called from one thread, and may block.

    Whatever it raises ends it, never the run.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite numbers of one step or version."""
        ...

    def check(self) -> None:
        """Looks after its files; called every few seconds while no numbers come."""
        ...

    def close(self) -> None:
        """Sends what is left."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracking service shows it.

    `run_id` is the service's own name of the run and stays the same when the run is resumed; empty
    when the service draws one.
    """

    folder: Path
    project: str
    name: str
    run_id: str
    settings: Mapping[str, JsonValue]


def told_settings(config: Config) -> dict[str, JsonValue]:
    """All settings but secrets, flat: `algorithm.max_staleness`."""
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
