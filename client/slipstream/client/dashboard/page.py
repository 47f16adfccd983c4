"""Pages that hold all they show: they ask for nothing, so that they can be sent to somebody."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slipstream.client.dashboard.server import RunFolders, UnknownRun
from slipstream.core.errors import ConfigError

# Most bytes of replies in a page.
MOST_REPLY_BYTES = 16 << 20
_IMPORT = 'import { bars, draw, element, number } from "./chart.js";\n'


def whole_page(title: str, body: str, data: object, script: str) -> str:
    """Returns a page of HTML; `script` finds `data` as JSON in the element `given`.

    `body` is markup. What comes from models and environments belongs into `data`, as text.
    """
    style, chart = (_file(name) for name in ("page.css", "chart.js"))
    text = json.dumps(data).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">",
            f"<title>{escape(title)}</title><style>{style}</style>{body}",
            f'<script type="application/json" id="given">{text}</script>',
            # In a block of its own the script may have names that the chart has, too.
            f'<script type="module">{chart}{{{script}}}</script></html>',
        ]
    )


def write_page(path: Path, text: str) -> None:
    """Writes a new file; raises ConfigError if it exists or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already: remove it, or name another file by --out"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def save_run(folder: Path, out: Path) -> int:
    """Writes the dashboard of one run into the file `out`; raises ConfigError."""
    folder = folder.resolve()
    try:
        answers, left_out = _answers(RunFolders(folder), folder.name)
    except UnknownRun:
        raise ConfigError(f"--out needs the folder of one run with metrics, got {folder}") from None
    body = _file("index.html").partition("<body>")[2].partition("</body>")[0]
    script = _file("page.js").removeprefix(_IMPORT)
    write_page(out, whole_page(f"Slipstream: {folder.name}", body, answers, script))
    what = f"step{'s' * (left_out != 1)}"
    less = f"; the replies of {left_out} older {what} were left out" if left_out else ""
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB{less}")
    return 0


def _answers(runs: RunFolders, name: str) -> tuple[Mapping[str, Any], int]:
    """Returns the server's answers by path, and the number of steps whose replies are left out."""
    # encodeURIComponent leaves these characters, too.
    of = "/api/runs/" + quote(name, safe="!'()*")
    steps: list[int] = runs.trajectories(name, None)["steps"]
    replies: dict[str, Any] = {}
    size, shown = 0, []
    for step in reversed(steps):
        found = runs.trajectories(name, step)
        size += len(json.dumps(found))
        if size > MOST_REPLY_BYTES:
            break
        shown.append(step)
        replies[f"{of}/trajectories?step={step}"] = found
    for found in replies.values():
        found["steps"] = sorted(shown)
    newest = replies.get(f"{of}/trajectories?step={shown[0]}") if shown else None
    (overview,) = [line for line in runs.overview() if line["name"] == name]
    answers = {
        "/api/runs": [overview | {"has_trace": False}],
        f"{of}/metrics?from=0": vars(runs.metrics(name, 0)),
        f"{of}/trajectories": newest or {"steps": [], "step": None, "trajectories": []},
        f"{of}/groups": runs.groups(name),
        f"{of}/about": runs.about(name),
    }
    return answers | replies, len(steps) - len(shown)


def _file(name: str) -> str:
    return files("slipstream.client.dashboard").joinpath(name).read_text(encoding="utf-8")
