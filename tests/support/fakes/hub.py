"""A hub of models and data sets on loopback, as the clients of Hugging Face's see it."""

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """Folders as repositories: `folder`/owner/name/...; requests are noted.

    `commit` is that of the newest state; the older COMMIT has the same files.
    """

    folder: Path
    url: str = ""
    commit: str = COMMIT
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)

    def files(self, name: str) -> dict[str, bytes]:
        root = self.folder / name
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length)
        url = urlsplit(self.path)
        self.hub.requests.append(f"{self.command} {self.path}")
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] == "api" and parts[1] in ("datasets", "models") and len(parts) >= 4:
            self._api("/".join(parts[2:4]), parts[4:], url.query, body)
            return
        # The path of a model begins with its owner.
        repository = parts[1:] if parts[0] == "datasets" else parts
        if repository[2:3] == ["resolve"]:
            self._file(
                "/".join(repository[:2]), repository[3], "/".join(repository[4:])
            )
        else:
            self._error(404, "EntryNotFound", f"no {url.path}")

    def _refused(self, name: str, revision: str) -> bool:
        if name in self.hub.gated:
            self._error(403, "GatedRepo", f"{name} is gated")
        elif name in self.hub.private:
            self._error(401, "", "Invalid username or password.")
        elif not (self.hub.folder / name).is_dir():
            self._error(404, "RepoNotFound", "Repository not found")
        elif revision not in ("main", COMMIT, self.hub.commit):
            self._error(404, "RevisionNotFound", f"no revision {revision}")
        else:
            return False
        return True

    def _api(self, name: str, rest: list[str], query: str, body: bytes) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        if self._refused(name, revision):
            return
        files = self.hub.files(name)
        entries = [_entry(path, content) for path, content in files.items()]
        kind = rest[0] if rest else "revision"
        if kind == "revision":
            siblings = [{"rfilename": path} for path in files]
            sha = self.hub.commit if revision == "main" else revision
            self._json({"id": name, "sha": sha, "private": False, "siblings": siblings})
        elif kind == "tree":
            below = "".join(f"{part}/" for part in rest[2:])
            all_entries = entries + _folders(files)
            inside = [e for e in all_entries if str(e["path"]).startswith(below)]
            if not inside:
                self._error(404, "EntryNotFound", f"no folder {below}")
                return
            if parse_qs(query).get("recursive", ["false"])[0].lower() != "true":
                inside = [
                    e for e in inside if "/" not in str(e["path"]).removeprefix(below)
                ]
            self._json(inside)
        elif kind == "paths-info":
            body_paths = (
                json.loads(body)["paths"]
                if body[:1] == b"{"
                else parse_qs(body.decode())
            )
            expected = (
                body_paths["paths"] if isinstance(body_paths, dict) else body_paths
            )
            self._json([e for e in entries + _folders(files) if e["path"] in expected])
        else:
            self._error(404, "EntryNotFound", f"no {kind}")

    def _file(self, name: str, revision: str, path: str) -> None:
        if self._refused(name, revision):
            return
        content = self.hub.files(name).get(path)
        if content is None:
            self._error(404, "EntryNotFound", f"no {path}")
            return
        first = 0
        last = len(content)
        byte_range = self.headers.get("range", "")
        if byte_range.startswith("bytes="):
            begin, _, end = byte_range.removeprefix("bytes=").partition("-")
            first = int(begin)
            last = min(last, int(end) + 1 if end else last)
        self._send(
            206 if byte_range else 200,
            content[first:last],
            {
                "ETag": f'"{_oid(content)}"',
                "X-Repo-Commit": self.hub.commit if revision == "main" else revision,
                "Content-Range": f"bytes {first}-{last - 1}/{len(content)}",
                "Accept-Ranges": "bytes",
            },
        )

    def _json(self, value: object) -> None:
        self._send(
            200, json.dumps(value).encode(), {"Content-Type": "application/json"}
        )

    def _error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | (
            {"X-Error-Code": code} if code else {}
        )
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": _oid(content)}


def _folders(files: Iterable[str]) -> list[dict[str, object]]:
    folders = {str(parent) for path in files for parent in Path(path).parents} - {"."}
    return [
        {"type": "directory", "path": folder, "size": 0, "oid": ""}
        for folder in sorted(folders)
    ]


@contextmanager
def serve_hub(folder: Path) -> Iterator[Hub]:
    """Serves the data sets in `folder` until the block ends."""
    hub = Hub(folder)
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})
    )
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}
    )
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
