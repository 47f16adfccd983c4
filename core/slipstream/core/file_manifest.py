"""A manifest that grows with a folder's files: size and digest of each, before it is written.

Each line of `manifest.jsonl` is one change: a file with its bytes, or files that go. A line is on
the disk before its change is made, so only the change of the last line may not have been made yet.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.core.errors import ProtocolError
from slipstream.core.machine.files import open_regular, read_regular, replace_file
from slipstream.core.run_folder import FILE_DIGEST_BYTES, GROWING_MANIFEST

# Number of a file's bytes, and their BLAKE2b in hexadecimal.
_Facts: TypeAlias = tuple[int, str]
# The sorted names of a line's facts: of a file with its bytes, and of files that go.
_FORMS = (
    ["digest", "num_bytes", "path"],
    ["removed"],
)
# A start writes the manifest anew if it has so many lines more than two for each file.
_SPARE_LINES = 4096


class ManifestedFolder:
    """The one writer of a folder whose files are in its manifest; every method blocks on the disk.

    Several threads may call it.
    """

    def __init__(self, folder: Path) -> None:
        """Makes the folder, and finishes what a killed writer has begun.

        Files of a folder without a manifest, which an older release wrote, get their lines. Raises
        ProtocolError for a file that is not as it was written, and for one that was not written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / GROWING_MANIFEST
        self._lock = threading.Lock()
        self._is_closed = False
        self._facts: dict[str, _Facts] = {}
        for path in folder.glob(".*"):
            path.unlink()
        if self._path.exists():
            self._recover()
        else:
            for name in self._names():
                self._facts[name] = _facts_of(read_regular(folder / name))
            self._rewrite()

    def write(self, name: str, data: bytes) -> None:
        """Writes a file, in place of an earlier one; raises ProtocolError after `close`."""
        facts = _facts_of(data)
        with self._lock:
            self._append(_written(name, facts))
            replace_file(self._folder / name, data)
            self._facts[name] = facts

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, in this order; raises ProtocolError after `close`."""
        spent = [*names]
        if not spent:
            return
        with self._lock:
            self._append({"removed": spent})
            for name in spent:
                (self._folder / name).unlink()
                del self._facts[name]

    def read(self, name: str) -> bytes:
        """Returns the bytes of a file that was written.

        Raises ProtocolError if they are others, and FileNotFoundError if somebody has removed it.
        """
        with self._lock:
            data = read_regular(self._folder / name)
            if _facts_of(data) != self._facts[name]:
                raise ProtocolError(_changed(self._folder / name))
        return data

    def close(self) -> None:
        """Ends the writes: who reads the folder from now on finds it as it stays."""
        with self._lock:
            self._is_closed = True

    def _append(self, change: Mapping[str, Any]) -> None:
        if self._is_closed:
            raise ProtocolError(f"{self._folder} gets no more files: its run is over")
        with open_regular(self._path, "ab") as file:
            file.write(_line(change))
            file.flush()
            os.fsync(file.fileno())

    def _recover(self) -> None:
        """Reads the manifest, and makes or takes back the change of its last line."""
        changes, is_torn = self._changes()
        told: dict[str, _Facts] = {}
        before: dict[str, _Facts] = {}
        for place, change in enumerate(changes, start=1):
            if place == len(changes):
                before = dict(told)
            for name in change.get("removed", ()):
                told.pop(name, None)
            if "path" in change:
                told[change["path"]] = (change["num_bytes"], change["digest"])
        for name in sorted({*told, *before, *self._names()}):
            present = self._present(name)
            last = told.get(name)
            earlier = before.get(name)
            is_made = present == last
            is_unmade = present == earlier and earlier != last
            if not (is_made or is_unmade):
                raise ProtocolError(_changed(self._folder / name))
            if present is not None and last is None:
                (self._folder / name).unlink()
            elif present is not None:
                self._facts[name] = present
        is_long = len(changes) > 2 * len(self._facts) + _SPARE_LINES
        if is_torn or is_long or self._facts != told:
            self._rewrite()

    def _changes(self) -> tuple[list[dict[str, Any]], bool]:
        """Returns the changes of the manifest, and whether a kill has cut a line behind them."""
        changes: list[dict[str, Any]] = []
        with open_regular(self._path) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return changes, True
                change = _parsed(line)
                if change is None:
                    raise ProtocolError(_changed(self._path))
                changes.append(change)
        return changes, False

    def _rewrite(self) -> None:
        lines: list[bytes] = []
        for name, facts in sorted(self._facts.items()):
            change = _written(name, facts)
            lines.append(_line(change))
        replace_file(self._path, b"".join(lines))

    def _names(self) -> list[str]:
        return [path.name for path in self._folder.iterdir() if path != self._path]

    def _present(self, name: str) -> _Facts | None:
        try:
            return _facts_of(read_regular(self._folder / name))
        except FileNotFoundError:
            return None


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Returns the change of a line, or None if no writer has written it."""
    try:
        change = json.loads(line)
    except ValueError:
        return None
    if not isinstance(change, dict):
        return None
    names = sorted(change)
    return change if names in _FORMS else None


def _written(name: str, facts: _Facts) -> dict[str, Any]:
    num_bytes, digest = facts
    return {
        "path": name,
        "num_bytes": num_bytes,
        "digest": digest,
    }


def _line(change: Mapping[str, Any]) -> bytes:
    return json.dumps(change).encode() + b"\n"


def _facts_of(data: bytes) -> _Facts:
    digest = hashlib.blake2b(data, digest_size=FILE_DIGEST_BYTES)
    return len(data), digest.hexdigest()


def _changed(path: Path) -> str:
    return (
        f"{path} is not what the run wrote, by its line in {GROWING_MANIFEST}: put the folder back "
        "from a copy of the run"
    )
