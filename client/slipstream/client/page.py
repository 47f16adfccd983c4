"""Writes one page of HTML about one or several runs: curves, settings that differ, and replies.

The page loads nothing from elsewhere, so it can be sent to somebody. A run writes its own page
while it goes on. Text of models and environments is only in the page's JSON, and is shown as text.
"""

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from slipstream.client.heldout import compared, special_texts, without_special
from slipstream.client.run_folder import (
    MOST_TABLE_BYTES,
    lines_of,
    parsed,
    read_summary,
    settings_of,
)
from slipstream.client.terminal import say
from slipstream.core.configuration.toml_text import parse_toml
from slipstream.core.errors import ConfigError
from slipstream.core.machine.files import open_regular, read_regular, replace_file
from slipstream.core.run_folder import CONFIG, METRICS, SAMPLES
from slipstream.core.settings.config import told_settings
from slipstream.core.waits import within

PAGE = "page.html"
# Seconds between two pages of a run that goes on.
PERIOD_S = 30.0
# Most points of a curve, and the newest ones, which are always kept.
MOST_POINTS = 500
NEWEST = 10
# Most bytes of the kept episodes, most episodes, and characters of their texts.
TAIL_BYTES = 4 << 20
MOST_REPLIES = 48
MOST_CHARACTERS = 6000
# Most characters of a text in the folded line of an episode.
SHORT_CHARACTERS = 60
_EVALUATION = b'"evaluation_step"'
# Larger numbers of a step or a metric are damage.
MOST = 1e30
# Metrics that are no curve.
_NO_CURVES = ("step", "evaluation_step", "wall_s")
# Settings that differ between any two runs and change nothing else.
_OF_EACH = ("run.name", "run.dir")
_MISSING = "–"


def write_pages(folders: Sequence[Path], out: Path | None) -> int:
    """Writes the page of the runs in `folders`, prints its path and returns exit code 0.

    Without `out` the page of one run is in its folder, and the page of several is here. Raises
    ConfigError if a folder is no run, or if the page is there already and is not a run's own.
    """
    for folder in folders:
        settings_of(folder)
    path = out or (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
    if path.exists() and (out is not None or len(folders) > 1):
        raise ConfigError(f"{path} exists already: remove it, or name another file by --out")
    try:
        write_page(folders, path, period_s=0)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    say(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


@contextlib.asynccontextmanager
async def page_kept(folder: Path, warn: Callable[[str], None]) -> AsyncIterator[None]:
    """Writes the page of a run every `PERIOD_S` and at the block's end; warns of one failure."""
    has_warned = False
    ended = asyncio.Event()

    def write(period_s: float) -> None:
        nonlocal has_warned
        try:
            write_page([folder], folder / PAGE, period_s=period_s)
        except OSError as error:
            if not has_warned:
                warn(f"{folder / PAGE} cannot be written: {error.strerror or error}")
            has_warned = True

    async def keep() -> None:
        while not ended.is_set():
            await asyncio.to_thread(write, PERIOD_S)
            await within(PERIOD_S, ended.wait())
        await asyncio.to_thread(write, 0)

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        ended.set()
        await keeping


def write_page(folders: Sequence[Path], path: Path, *, period_s: float) -> None:
    """Replaces a page, which reloads itself every `period_s` unless 0; raises OSError."""
    settings = [settings_in(folder) for folder in folders]
    names = [
        str(values.get("run.name") or p.name) for values, p in zip(settings, folders, strict=True)
    ]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs = []
    for name, folder, run_settings in zip(names, folders, settings, strict=True):
        summary = read_summary(folder) or {}
        ended = {key: summary.get(key) for key in ("state", "cause", "suspended_environments")}
        special = special_texts(Path(str(run_settings.get("model.path"))))
        runs.append(
            {
                "name": name,
                **ended,
                "steps": run_settings.get("run.steps"),
                "environments": _environments(run_settings),
                "curves": _curves(folder),
                "replies": _with_short_texts(_replies(folder), special),
                "heldout": _heldout(folder, special),
            }
        )
    page_data = {"runs": runs, "settings": list(differences(settings)), "period_s": period_s}
    page_data["written"] = time.strftime("%Y-%m-%d %H:%M:%S")
    template = files("slipstream.client").joinpath(PAGE).read_text(encoding="utf-8")
    before, script, after = template.split("<!-- cut -->")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before = before.replace("TITLE", escape(" and ".join(names))).replace("DIGEST", digest)
    data = json.dumps(page_data).replace("<", "\\u003c")
    text = (
        f'{before}<script type="application/json" id="given">{data}</script>'
        f"<script>{script}</script>{after}"
    )
    # A folder's name may be no UTF-8.
    replace_file(path, text.encode(errors="replace"))


def settings_in(folder: Path) -> dict[str, JsonValue]:
    """Returns all settings of a run but secrets, by dotted names; none where no file is whole."""
    with contextlib.suppress(OSError, ValueError):
        text = read_regular(folder / CONFIG, most_bytes=MOST_TABLE_BYTES).decode()
        return told_settings(parse_toml(text))
    return {}


def differences(settings: Sequence[Mapping[str, JsonValue]]) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and texts of each setting that differs; a table that runs lack is one."""
    table_names = [{table for name in stated for table in _tables(name)} for stated in settings]
    common = set.intersection(*table_names)
    shown = dict[str, list[JsonValue]]()
    for setting in dict.fromkeys(key for stated in settings for key in stated):
        rare = next((table for table in _tables(setting) if table not in common), "")
        shown[rare or setting] = [
            ("there" if rare in tables else _MISSING) if rare else stated.get(setting, _MISSING)
            for stated, tables in zip(settings, table_names, strict=True)
        ]
    for name, values in shown.items():
        if name not in _OF_EACH and any(value != values[0] for value in values):
            yield name, [v if isinstance(v, str) else json.dumps(v, default=str) for v in values]


def _tables(setting: str) -> list[str]:
    return [setting[: dot.start()] for dot in re.finditer(r"\.", setting)]


def _environments(settings: Mapping[str, JsonValue]) -> dict[str, dict[str, JsonValue]]:
    """Returns a colour's number for each environment and evaluation of a run, by name.

    An evaluation has the colour of the environment that it resembles most.
    """
    trained = _played(settings, "environments")
    evaluations = _played(settings, "evaluations")
    numbers = {name: number for number, name in enumerate(trained)}
    environments: dict[str, dict[str, JsonValue]] = {
        name: {"colour": number, "heldout": False} for name, number in numbers.items()
    }
    for name, values in evaluations.items():
        same_class = [
            other for other in trained if trained[other].get("reference") == values.get("reference")
        ]
        alike = max(
            same_class,
            key=lambda other: (
                len(trained[other].items() & values.items()),
                name.startswith(other),
                len(os.path.commonprefix([other, name])),
            ),
            default=None,
        )
        colour = len(environments) if alike is None else numbers[alike]
        environments[name] = {"colour": colour, "heldout": True}
    return environments


def _played(settings: Mapping[str, JsonValue], table: str) -> dict[str, dict[str, str]]:
    """Returns the class and the arguments of each entry of a table, as texts, by its name."""
    played: dict[str, dict[str, str]] = {}
    for place in itertools.count():
        prefix = f"{table}.{place}."
        name = settings.get(f"{prefix}name")
        if not isinstance(name, str):
            break
        own = {
            key.removeprefix(prefix): str(value)
            for key, value in settings.items()
            if key.startswith(prefix)
        }
        played[name] = {
            key: text for key, text in own.items() if key == "reference" or key.startswith("args.")
        }
    return played


def _with_short_texts(rows: Sequence[JsonValue], special: Sequence[str]) -> list[JsonValue]:
    """Returns kept episodes with what a folded line shows of their texts, in `short`."""
    shown: list[JsonValue] = []
    for row in rows:
        if not isinstance(row, dict):
            continue
        short: dict[str, JsonValue] = {}
        for name in ("prompt", "reply", "answer"):
            text = without_special(str(row.get(name) or ""), special)
            if len(text) > SHORT_CHARACTERS:
                # A reply begins behind the end of its prompt.
                is_prompt = name == "prompt"
                end = f"…{text[1 - SHORT_CHARACTERS :]}"
                beginning = f"{text[: SHORT_CHARACTERS - 1]}…"
                text = end if is_prompt else beginning
            short[name] = text
        shown.append({**row, "short": short})
    return shown


def _heldout(folder: Path, special: Sequence[str]) -> list[JsonValue]:
    comparisons = itertools.islice(compared(folder, special), MOST_REPLIES)
    return [_cut(asdict(comparison)) for comparison in comparisons]


def _curves(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Returns (step, value) points of each metric; steps and evaluations are thinned evenly."""
    curves: dict[str, dict[float, float]] = {}
    counts = Counter[bool]()
    seen = Counter[bool]()
    with contextlib.suppress(OSError), open_regular(folder / METRICS) as file:
        counts.update(_EVALUATION in line for line in lines_of(file))
        file.seek(0)
        for line in lines_of(file):
            kind = _EVALUATION in line
            place = seen[kind]
            stride = max(1, -(-counts[kind] // MOST_POINTS))
            seen[kind] += 1
            if place % stride == 0 or place >= counts[kind] - NEWEST:
                parsed_line = parsed(line)
                row: Mapping[str, Any] = parsed_line if isinstance(parsed_line, dict) else {}
                step = row.get("step", row.get("evaluation_step"))
                for name, value in row.items():
                    # Without tokens of lag 0 there is no gap, which is not a gap of 0.
                    is_gap = name.startswith("logprob_gap_")
                    if name in _NO_CURVES or (is_gap and row.get("logprob_gap_tokens") == 0):
                        continue
                    numbers = isinstance(step, int | float) and isinstance(value, int | float)
                    if numbers and abs(step) < MOST and abs(value) < MOST:
                        curves.setdefault(name, {})[step] = float(f"{value:.5g}")
    return {name: sorted(points.items()) for name, points in curves.items()}


def reply_lines(folder: Path, model: Path, most: int) -> list[str]:
    """Returns a line for each of the `most` newest kept replies, with its prompt and reward."""
    special = special_texts(model)
    lines = []
    for row in _replies(folder)[:most]:
        if isinstance(row, dict):
            prompt = without_special(str(row.get("prompt")), special)
            reply = without_special(str(row.get("reply")), special)
            lines.append(f"{prompt}: {reply!r}, reward {row.get('reward')}")
    return lines


def _replies(folder: Path) -> list[JsonValue]:
    """Returns the newest kept episodes, newest first, with texts of limited length."""
    lines: list[bytes] = []
    with contextlib.suppress(OSError), open_regular(folder / SAMPLES) as file:
        # The first line may be cut, and is then no JSON.
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).splitlines()
    return [_cut(row) for row in map(parsed, lines[-MOST_REPLIES:]) if isinstance(row, dict)][::-1]


def _cut(value: JsonValue, depth: int = 8) -> JsonValue:
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        return f"{value[:MOST_CHARACTERS]} …"
    if isinstance(value, dict | list) and not depth:
        return None
    if isinstance(value, dict):
        return {key: _cut(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_cut(inner, depth - 1) for inner in value[:MOST_REPLIES]]
    return value
