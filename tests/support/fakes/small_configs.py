"""Settings of a run that is never started."""

from __future__ import annotations

from pathlib import Path

from slipstream.core.configuration.config_file import parse_config
from slipstream.core.settings.config import Config


def config_of(folder: Path, **run: object) -> Config:
    table = {
        "run": {"name": "test", "dir": str(folder), "steps": 10, **run},
        "model": {"path": "model"},
        "algorithm": {"group_size": 2, "groups_per_step": 2, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 4, "max_episode_tokens": 16},
    }
    return parse_config(table, source="test")
