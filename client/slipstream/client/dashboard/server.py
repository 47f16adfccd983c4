"""The web server of the dashboard, for browsers on this machine alone.

It listens on loopback only and answers only requests to a loopback name, so that no web page
reaches it through a name of its own (DNS rebinding). It reads files of runs and changes nothing.
Text of a model or an environment travels as JSON and is shown as text.
"""

from __future__ import annotations

import errno
import json
import re
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from slipstream.client.dashboard.folders import RunFolders, UnknownRun
from slipstream.core.errors import ConfigError

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
_RUN = re.compile(r"/api/runs/([^/]+)/(metrics|trajectories|about)")


def open_dashboard(folder: Path, port: int) -> ThreadingHTTPServer:
    """Returns a server that listens already; ConfigError for a taken port or a missing folder.

    `port` 0 chooses a free port.
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


def serve_dashboard(folder: Path, port: int) -> int:
    """Serves the dashboard until Ctrl-C; returns the exit code."""
    with open_dashboard(folder, port) as server:
        number = len(RunFolders(folder.resolve()).names())
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
        """Answers with one of our files, or with JSON."""
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in _NAMES:
            self._answer(HTTPStatus.FORBIDDEN, b"ask for 127.0.0.1", "text/plain")
            return
        url = urlsplit(self.path)
        if url.path in _FILES:
            name, kind = _FILES[url.path]
            data = files("slipstream.client.dashboard").joinpath(name).read_bytes()
            self._answer(HTTPStatus.OK, data, kind)
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
            "about": lambda: self.folders.about(name),
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
    """Returns a whole number, not negative, of the query, or `default`; ValueError."""
    if name not in query:
        return default
    text = query[name][-1]
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"{name} must be a whole number, got {text[:40]!r}")
    return int(text)
