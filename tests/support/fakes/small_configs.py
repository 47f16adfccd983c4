"""Settings of a run that is never started."""

from collections.abc import Mapping
from pathlib import Path

from slipstream.core.configuration.config_file import parse_config
from slipstream.core.settings.config import Config

SMALLEST: dict[str, dict[str, object]] = {
    "run": {"name": "test", "steps": 10},
    "model": {"path": "model"},
    "algorithm": {"group_size": 2, "groups_per_step": 2, "learning_rate": 1e-3},
    "sampling": {"max_reply_tokens": 4, "max_episode_tokens": 16},
}


def small_config(**tables: object) -> Config:
    """The smallest settings; a mapping among `tables` changes the keys that it names."""
    laid = {
        name: {**SMALLEST.get(name, {}), **values} if isinstance(values, Mapping) else values
        for name, values in tables.items()
    }
    return parse_config(SMALLEST | laid, source="test")


def config_of(folder: Path, **run: object) -> Config:
    return small_config(run={"dir": str(folder), **run})
