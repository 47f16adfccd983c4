"""Serves the dashboard to browsers on this machine, and saves it as a page in one file.

A saved page loads nothing from elsewhere, so it can be sent to somebody. The server listens on
loopback only and answers only requests to a loopback name, so that no web page reaches it through a
host name that resolves to loopback (DNS rebinding). It reads folders of runs, into which the runs
may still be writing, and changes nothing. Text of a model or an environment is sent as JSON and
shown as text, never as markup.
"""

from __future__ import annotations

import errno
import json
import math
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from slipstream.core.errors import ConfigError
from slipstream.core.run_folder import GROUPS, METRICS, SAMPLES, SUMMARY, SUSPENDED, TRACE, log_path

# Most bytes of a file in one answer; the page asks for the rest in further calls.
MOST_BYTES = 4 << 20
# Most bytes of replies in a saved page.
MOST_REPLY_BYTES = 16 << 20
MOST_SAMPLES = 256
MOST_GROUPS = 20_000
# Most points of a curve that a screen can show, and the newest points, which are always kept.
MOST_POINTS, NEWEST = 1000, 10
_TAIL_BYTES = 64 << 10
# A larger number of a step is damage: no run has so many steps.
_MOST_STEPS = 10**12
_HOST = "127.0.0.1"
_LAST_PORT = 65535
_NAMES = ("127.0.0.1", "localhost")
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_RUN = re.compile(r"/api/runs/([^/]+)/(metrics|trajectories|groups|about|trace)")
_EVALUATION = b'"evaluation_step"'
# A saved page has the chart's functions in the same script.
_IMPORT = 'import { bars, draw, element, number } from "./chart.js";\n'


def open_dashboard(folder: Path, port: int) -> ThreadingHTTPServer:
    """Returns a web server for the runs in `folder` that already listens on a port of loopback.

    `port` 0 chooses a free port. Raises ConfigError if there is no such folder, or if the port is
    invalid or taken.
    """
    if not folder.is_dir():
        raise ConfigError(f"the dashboard needs a folder of runs, or a run's own, got {folder}")
    runs = RunFolders(folder.resolve())

    class Handler(_Handler):
        folders = runs

    if not 0 <= port <= _LAST_PORT:
        raise ConfigError(f"--port must be from 0 to {_LAST_PORT}, got {port}")
    try:
        return ThreadingHTTPServer((_HOST, port), Handler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "is taken, perhaps by another dashboard"
        else:
            why = f"cannot be opened ({error.strerror})"
        raise ConfigError(
            f"port {port} of this machine {why}; choose another one with --port, 0 takes a free one"
        ) from error


def serve_dashboard(folder: Path, port: int, out: Path | None) -> int:
    """Serves the runs in `folder` until Ctrl-C, or writes the page of one run to `out` if given.

    Returns 0. Raises ConfigError if the folder, the port or `out` cannot be used.
    """
    if out is not None:
        return save_run(folder, out)
    with open_dashboard(folder, port) as server:
        number = len(RunFolders(folder.resolve()).runs())
        what = f"{number} run{'s' * (number != 1)} in {folder}"
        print(f"{what}: http://{_HOST}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


class _Handler(BaseHTTPRequestHandler):
    folders: RunFolders
    server_version, sys_version = "slipstream", ""
    # Seconds after which a client that sends nothing loses its thread.
    timeout = 20.0

    def do_GET(self) -> None:
        """Answers a GET request with a file of the dashboard, or with JSON."""
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in _NAMES:
            self._answer(HTTPStatus.FORBIDDEN, b"ask for 127.0.0.1", "text/plain")
            return
        url = urlsplit(self.path)
        if url.path in _FILES:
            name, kind = _FILES[url.path]
            self._answer(HTTPStatus.OK, _file(name).encode(), kind)
            return
        try:
            found = self._find(url.path, parse_qs(url.query))
        except UnknownRun:
            found = None
        except ValueError as error:
            self._answer(HTTPStatus.BAD_REQUEST, str(error).encode(), "text/plain")
            return
        if found is None:
            self._answer(HTTPStatus.NOT_FOUND, b"not here", "text/plain")
            return
        self._answer(HTTPStatus.OK, json.dumps(found).encode(), "application/json")

    def _find(self, path: str, query: dict[str, list[str]]) -> object:
        if path == "/api/runs":
            return self.folders.overview()
        match = _RUN.fullmatch(path)
        if match is None:
            return None
        name = unquote(match[1])
        answers: dict[str, Callable[[], object]] = {
            "metrics": lambda: vars(self.folders.metrics(name, _number(query, "from", 0))),
            "trajectories": lambda: self.folders.trajectories(name, _number(query, "step", None)),
            "groups": lambda: self.folders.groups(name),
            "about": lambda: self.folders.about(name),
            "trace": lambda: self.folders.trace(name),
        }
        return answers[match[2]]()

    def _answer(self, status: HTTPStatus, data: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(data))),
            ("Content-Security-Policy", _POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 - its signature
        """Logs only errors of this server, not every request of a browser."""
        if args and str(args[1] if len(args) > 1 else "").startswith("5"):
            print(f"dashboard: {format % args}", file=sys.stderr)


def _number(query: dict[str, list[str]], name: str, default: Any) -> Any:  # noqa: ANN401
    """Returns the query parameter `name` as a number, or `default` if the query has none.

    Raises ValueError for a value that is not a whole number from 0 on.
    """
    if name not in query:
        return default
    text = query[name][-1]
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"{name} must be a whole number, got {text[:40]!r}")
    return int(text)


class UnknownRun(LookupError):
    """The folder has no run of the requested name."""


@dataclass(frozen=True)
class FileRows:
    """The rows of a JSON-lines file from a given byte on, without an incomplete last line.

    `end` is the byte offset after the last complete line. `is_all` is true if the file had no more
    bytes to read.
    """

    rows: list[dict[str, Any]]
    end: int
    is_all: bool


class RunFolders:
    """Reads the runs directly below a folder, or one run if the folder is that run's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def runs(self) -> list[Path]:
        """Returns the folders of runs that have metrics, the most recently written first."""
        is_one = _is_run(self._folder)
        found = [self._folder] if is_one else filter(_is_run, self._folder.glob("*"))
        return sorted(found, key=_written_s, reverse=True)

    def overview(self) -> list[dict[str, Any]]:
        """Returns a dict for each run: its name, the Unix time when it last wrote, and its summary.

        The keys of the summary are missing until the run has ended. `suspended_environments` and
        `has_trace`, whether the run has a trace of a step, are there for every run.
        """
        lines = []
        for folder in self.runs():
            has_trace = (folder / TRACE).is_file()
            line = {"name": folder.name, "written_s": _written_s(folder), "has_trace": has_trace}
            suspended = {"suspended_environments": _table(folder / SUSPENDED)}
            lines.append(line | suspended | _table(folder / SUMMARY))
        return lines

    def metrics(self, name: str, begin: int) -> FileRows:
        """Returns the rows of metrics.jsonl from byte `begin` on; thins them if `begin` is 0.

        Raises UnknownRun if there is no run `name`.
        """
        path = self._of(name) / METRICS
        return _lines(path, begin) if begin else _thinned_lines(path)

    def all_metrics(self, name: str) -> Iterator[dict[str, Any]]:
        """Returns an iterator over all rows of metrics.jsonl.

        Raises UnknownRun if there is no run `name`.
        """
        return _rows(self._of(name) / METRICS)

    def trajectories(self, name: str, step: int | None) -> dict[str, Any]:
        """Returns the steps with kept trajectories, and the trajectories of one of these steps.

        `step` chooses that step; if it is None, the newest step is taken. At most `MOST_SAMPLES`
        trajectories are returned. Raises UnknownRun if there is no run `name`.
        """
        steps: set[int] = set()
        kept: dict[int, deque[dict[str, Any]]] = {}
        for row in _rows(self._of(name) / SAMPLES):
            number = row.get("step")
            if not isinstance(number, int | float) or not abs(number) <= _MOST_STEPS:
                continue
            number = int(number)
            steps.add(number)
            if step is None and number not in kept:
                kept.clear()
            if step is None or number == step:
                kept.setdefault(number, deque(maxlen=MOST_SAMPLES)).append(row)
        shown = step if step is not None else max(kept, default=None)
        rows = list(kept.get(shown, ())) if shown is not None else []
        return {"steps": sorted(steps), "step": shown, "trajectories": rows}

    def groups(self, name: str) -> list[dict[str, Any]]:
        """Returns the newest `MOST_GROUPS` valid rows of groups.jsonl.

        Raises UnknownRun if there is no run `name`.
        """
        return [*deque(filter(_is_group, _rows(self._of(name) / GROUPS)), maxlen=MOST_GROUPS)]

    def about(self, name: str) -> dict[str, Any]:
        """Returns `summary`, {} before the run's end, and `log`, the controller's last log lines.

        Raises UnknownRun if there is no run `name`.
        """
        folder = self._of(name)
        summary = _table(folder / SUMMARY)
        # `solved` is shown only for a run that ended early because its task is solved.
        if not summary.get("solved"):
            summary.pop("solved", None)
        return {"summary": summary, "log": _tail(log_path(folder, "controller"))}

    def trace(self, name: str) -> dict[str, Any]:
        """Returns the trace of the newest step that has one, or {} if no step has one.

        Raises UnknownRun if there is no run `name`.
        """
        return _table(self._of(name) / TRACE)

    def _of(self, name: str) -> Path:
        for folder in self.runs():
            if folder.name == name:
                return folder
        raise UnknownRun(name)


def _is_group(row: Mapping[str, Any]) -> bool:
    """Whether each field of the row that the page reads is a list of numbers or Nones."""
    lists = [row.get(name) for name in ("rewards", "sampled_tokens", "surprisal")]
    return all(
        isinstance(values, list) and all(v is None or isinstance(v, int | float) for v in values)
        for values in lists
    )


def _is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file()


def _written_s(folder: Path) -> float:
    try:
        return (folder / METRICS).stat().st_mtime
    except OSError:
        return 0.0


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields all rows of a JSON-lines file; reads it in parts of limited size."""
    begin, is_all = 0, False
    while not is_all:
        part = _lines(path, begin)
        is_all, begin = part.is_all or part.end == begin, part.end
        yield from part.rows


def _lines(path: Path, begin: int) -> FileRows:
    """Reads at most `MOST_BYTES` of a JSON-lines file from byte `begin` on, up to a line's end.

    Damaged lines are left out. A file that cannot be read has no rows.
    """
    try:
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(MOST_BYTES)
            is_all = len(data) < MOST_BYTES
    except OSError:
        return FileRows([], begin, is_all=True)
    complete = data[: data.rfind(b"\n") + 1]
    rows = [row for row in map(_parsed, complete.splitlines()) if isinstance(row, dict)]
    return FileRows(rows, begin + len(complete), is_all)


def _thinned_lines(path: Path) -> FileRows:
    """Reads a whole file of metrics, but keeps only as many rows as a browser can show.

    It keeps up to `MOST_POINTS` evenly spaced rows of steps and the `NEWEST` rows, and the same of
    the rows of evaluations.
    """
    counts, seen, end = Counter[bool](), Counter[bool](), 0
    rows = []
    try:
        with path.open("rb") as file:
            counts.update(_EVALUATION in line for line in file)
            file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                kind = _EVALUATION in line
                place, stride = seen[kind], -(-counts[kind] // MOST_POINTS)
                seen[kind] += 1
                if place % stride == 0 or place >= counts[kind] - NEWEST:
                    rows.append(_parsed(line))
    except OSError:
        return FileRows([], 0, is_all=True)
    return FileRows([row for row in rows if isinstance(row, dict)], end, is_all=True)


def _table(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or {} while the file is missing or incomplete."""
    try:
        found = _parsed(path.read_bytes())
    except OSError:
        return {}
    return found if isinstance(found, dict) else {}


def _parsed(data: bytes) -> object:
    """Returns the parsed JSON, or None if it is invalid; NaN and infinities become None."""
    try:
        return json.loads(data, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float | None:
    # Browsers do not read an answer with NaN or infinity.
    value = float(text)
    return value if math.isfinite(value) else None


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-60:]
    except OSError:
        return []


def whole_page(title: str, body: str, data: object, script: str) -> str:
    """Returns a page of HTML with the markup `body` and with `script`, which reads `data`.

    `script` finds `data` as JSON in the element with the id `given`. Text of models and
    environments may be in `data` only, where it cannot become markup.
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
    """Writes the dashboard of the run in `folder` to the new file `out`; returns 0.

    Raises ConfigError if `folder` is no run with metrics, or if `out` exists or cannot be written.
    """
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
    """Returns the server's answers about a run by URL path, and the number of omitted steps.

    The replies of the oldest steps are omitted if all replies together are too large.
    """
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
