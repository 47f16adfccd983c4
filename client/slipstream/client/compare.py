"""Compares two runs: shows the settings that differ, and their curves side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from pydantic import JsonValue
from slipstream.client.dashboard.server import (
    MOST_POINTS,
    RunFolders,
    UnknownRun,
    whole_page,
    write_page,
)
from slipstream.client.run_folder import settings_of
from slipstream.client.terminal import aligned, plain, say
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import told_settings

# The metrics in the table; the page has curves of all metrics.
CURVES = (
    *("reward_mean", "reward_heldout", "lag_mean", "generated_tokens_per_s"),
    *("trained_tokens_per_s", "step_s", "training_s", "entropy", "kl", "grad_norm"),
    *("reply_tokens_mean", "truncated_fraction"),
)
# Number of newest points over which the table has means.
LAST = 10
# Settings that differ between any two runs and change nothing else.
_OF_EACH = ("run.name", "run.dir")
_MISSING = "–"
MOST_CHARACTERS = 48
Points: TypeAlias = list[tuple[float, float]]
# A name, and the text of each run.
Row: TypeAlias = tuple[str, str, str]

_SCRIPT = """
const { names, curves } = JSON.parse(document.getElementById("given").textContent);
for (const [title, both] of curves) {
  const figure = element("figure");
  document.getElementById("plots").append(figure);
  draw(figure, title, both.map((points, place) => ({ name: names[place], points })));
}
"""


@dataclass(frozen=True)
class ComparedRun:
    """A run's settings by dotted name, and its curves by metric: points (step, value)."""

    name: str
    settings: dict[str, JsonValue]
    curves: dict[str, Points]


def compare(folders: Sequence[Path], out: Path | None) -> int:
    """Prints the tables of two runs, and writes the page to `out` if given; returns exit code 0.

    Raises ConfigError if a run cannot be read, or `out` exists.
    """
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already: remove it, or name another file by --out")
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    tables = {"settings": list(differences(*runs)), "means": list(means(*runs))}
    say(as_text(names, tables))
    if out is not None:
        write_page(out, as_page(names, tables, runs))
    return 0


def read_run(folder: Path) -> ComparedRun:
    """Reads a run's settings and metrics, also while the run goes on.

    Raises ConfigError if the settings cannot be read, or there are no metrics yet.
    """
    folder = folder.resolve()
    config = load_config(settings_of(folder))
    curves: dict[str, dict[float, float]] = {}
    try:
        rows = RunFolders(folder).all_metrics(folder.name)
    except UnknownRun:
        raise ConfigError(f"{folder} has no metrics yet") from None
    for row in rows:
        step = row.get("step", row.get("evaluation_step"))
        for name, value in row.items():
            if isinstance(step, int | float) and isinstance(value, int | float):
                curves.setdefault(name, {})[step] = value
    for name in ("step", "evaluation_step", "wall_s"):
        curves.pop(name, None)
    points = {name: sorted(found.items()) for name, found in curves.items()}
    return ComparedRun(config.run.name, dict(_flat(told_settings(config))), points)


def _flat(settings: dict[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Yields settings by dotted names; tables in a list count from 1: `environments[1].name`."""
    for name, value in settings.items():
        tables = [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif tables:
            for place, table in enumerate(tables, start=1):
                yield from _flat(table, f"{prefix}{name}[{place}].")
        else:
            yield f"{prefix}{name}", value


def differences(one: ComparedRun, other: ComparedRun) -> Iterator[Row]:
    """Yields name and both values of each setting that differs, except those of `_OF_EACH`."""
    for name in dict.fromkeys([*one.settings, *other.settings]):
        texts = [_text(run.settings.get(name)) for run in (one, other)]
        if texts[0] != texts[1] and name not in _OF_EACH:
            yield name, texts[0], texts[1]


def _text(value: JsonValue) -> str:
    return _MISSING if value is None else value if isinstance(value, str) else json.dumps(value)


def means(one: ComparedRun, other: ComparedRun) -> Iterator[Row]:
    """Yields a row for each metric of `CURVES`: its mean in each run over the last `LAST` points.

    Points after the last step that both runs have reached do not count.
    """
    for name in CURVES:
        both = [run.curves.get(name, []) for run in (one, other)]
        if any(both):
            last = min(points[-1][0] for points in both if points)
            found = [[value for step, value in points if step <= last][-LAST:] for points in both]
            texts = [f"{fmean(values):.4g}" if values else _MISSING for values in found]
            yield f"{name}, to step {last:g}", texts[0], texts[1]


def as_text(names: Sequence[str], tables: dict[str, list[Row]]) -> str:
    """Returns the tables for a terminal."""
    rows = [("", *names), *(row for table in tables.values() for row in table)]
    lines = aligned([[plain(_cut(text)) for text in row] for row in rows])
    split = 1 + len(tables["settings"])
    return "\n".join([*lines[:split], "", *lines[split:]])


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"


def as_page(names: Sequence[str], tables: dict[str, list[Row]], runs: Sequence[ComparedRun]) -> str:
    """Returns one page of HTML with the tables, and a chart of each metric."""
    known = sorted(set().union(*(run.curves for run in runs)) - set(CURVES))
    shown = [name for name in (*CURVES, *known) if any(name in run.curves for run in runs)]
    curves = [(name, [thinned(run.curves.get(name, [])) for run in runs]) for name in shown]
    title = " and ".join(names)
    body = (
        f"<header><h1>{escape(title)}</h1></header><main>"
        f"{_table('Settings that differ', names, tables['settings'])}"
        f"{_table(f'Means of the last {LAST} steps that both have', names, tables['means'])}"
        '<h2>Curves</h2><div id="plots"></div></main>'
    )
    return whole_page(title, body, {"names": names, "curves": curves}, _SCRIPT)


def thinned(points: Points) -> Points:
    """Returns at most `MOST_POINTS` evenly spaced points, and the last point."""
    stride = -(-len(points) // MOST_POINTS)
    return [*points[: -1 : max(1, stride)], *points[-1:]]


def _table(title: str, names: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>"
        for name, *texts in [("", *names), *rows]
    ]
    return f"<h2>{title}</h2><table>{''.join(lines)}</table>"
