"""Settings of a run that is never started."""

import copy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from slipstream.client.run_folder import write_config
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config

SMALLEST: dict[str, dict[str, object]] = {
    "run": {"name": "test", "steps": 10},
    "model": {"path": "model"},
    "algorithm": {"group_size": 2, "groups_per_step": 2, "learning_rate": 1e-3},
    "sampling": {"max_reply_tokens": 4, "max_episode_tokens": 16},
}

# vLLM's own drafts, from the text of each request.
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def small_config(**tables: object) -> Config:
    """The smallest settings; a mapping among `tables` changes the keys that it names."""
    laid = {
        name: {**SMALLEST.get(name, {}), **values}
        if isinstance(values, Mapping)
        else values
        for name, values in tables.items()
    }
    return parse_config(SMALLEST | laid, source="test")


def config_of_engine(model: Path, /, **tables: Mapping[str, object]) -> Config:
    """Settings of a run whose engine starts quickly; `tables` add to them."""
    settings: dict[str, Mapping[str, object]] = {
        "model": {"path": str(model), "dtype": "float32"},
        "algorithm": {"group_size": 4, "groups_per_step": 1},
        "sampling": {"max_reply_tokens": 200, "max_episode_tokens": 250},
        "rollout_server": {"max_episodes": 16, "threads": 1, "enforce_eager": True},
    }
    return small_config(
        **tables
        | {name: {**settings[name], **tables.get(name, {})} for name in settings}
    )


def config_of(folder: Path, **run: object) -> Config:
    return small_config(run={"dir": str(folder), **run})


def run_of(folder: Path) -> Config:
    """The settings of a run that has begun in `folder`, with its files."""
    config = config_of(folder)
    (config.run_dir / "journal").mkdir(parents=True)
    (config.run_dir / "journal" / "journal.log").write_text("a record")
    write_config(config, config.run_dir)
    return config


def config_with(changes: Mapping[str, object] = MappingProxyType({})) -> Config:
    """The smallest settings with other values, by dotted key; a table adds to what is there."""
    table: dict[str, Any] = copy.deepcopy(SMALLEST)
    for key, value in changes.items():
        *parents, last = (
            int(part) if part.isdigit() else part for part in key.split(".")
        )
        place: Any = table
        for parent in parents:
            place = (
                place.setdefault(parent, {})
                if isinstance(place, dict)
                else place[parent]
            )
        is_table = isinstance(place, dict) and isinstance(place.get(last), dict)
        place[last] = place[last] | value if is_table else value
    return parse_config(table, source="test")


def refusal_of(changes: Mapping[str, object]) -> str:
    """The one line with which the smallest settings are refused with these values."""
    with pytest.raises(ConfigError) as caught:
        config_with(changes)
    line = str(caught.value)
    assert "\n" not in line
    return line.removeprefix("test: ")


def refusals(text: str) -> list[Any]:
    """Parameters of a test, named by their settings: TOML in one line, and what is said below it.

    What is said is indented, and may go on in further lines.
    """
    lines_by_table: list[tuple[str, list[str]]] = []
    for line in text.strip().splitlines():
        if line.startswith(" "):
            lines_by_table[-1][1].append(line.strip())
        elif not line.startswith("#"):
            lines_by_table.append((line, []))
    tables = [
        tomllib.loads(f"settings = {{{settings}}}")["settings"]
        for settings, _ in lines_by_table
    ]
    return [
        pytest.param(table, " ".join(lines), id=settings)
        for table, (settings, lines) in zip(tables, lines_by_table, strict=True)
    ]
