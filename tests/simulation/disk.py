"""The disk under a controller's journal: full for a while, slow, and cut at what was synced."""

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.core.run_folder import log_number
from slipstream.learner.controller.records.journal import Journal

from simulation.virtual_loop import PROCESS, Killed, Process

REMOVED = "removed"


class Disk:
    """Knows what of the journal's folder would outlive a loss of power."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._random = folder, random.Random(f"disk/{seed}")
        # Synced bytes of each log of the journal; every start of a controller begins one.
        self.synced: dict[Path, int] = {}
        # Batch files whose contents are synced, and those whose names are.
        self._filled: set[Path] = set()
        self._named: set[Path] = set()
        self.is_full = False
        # Syncs until the controller is killed in the middle of one; None: it is not.
        self.kill_at: int | None = None
        self.kill: Callable[[], None] = lambda: None
        self._fsync = os.fsync

    def fsync(self, descriptor: int) -> None:
        """Takes the place of `os.fsync`."""
        process = PROCESS.get()
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        is_journal = self._folder in (path, *path.parents)
        if process is None or not process.is_alive or not is_journal:
            return
        if self.kill_at is not None:
            self.kill_at -= 1
            if self.kill_at <= 0:
                self.kill_at = None
                if self._random.random() < 0.5:
                    self._sync(descriptor)
                self.kill()
                raise Killed
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._sync(descriptor)

    def _sync(self, descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith(".log"):
            self.synced[Path(name)] = os.fstat(descriptor).st_size
        elif name.endswith(".pb"):
            self._filled.add(Path(name))
        elif os.path.isdir(name):
            self._named |= {
                Path(name, n) for n in os.listdir(name) if n.endswith(".pb")
            }

    def mark(self) -> tuple[int, int]:
        """The number of the newest log, and its synced bytes."""
        marks = [(log_number(path.name), size) for path, size in self.synced.items()]
        return max(marks, default=(0, 0))

    def image(self, *, power_fails: bool) -> dict[Path, bytes]:
        """The files that a controller finds that starts after this moment."""
        contents = {
            path: path.read_bytes()
            for path in self._folder.rglob("*")
            if path.is_file()
        }
        if power_fails:
            for path in [path for path in contents if path.suffix == ".log"]:
                synced_bytes = self.synced.get(path, 0)
                num_bytes = len(contents[path])
                contents[path] = contents[path][
                    : self._random.randint(min(synced_bytes, num_bytes), num_bytes)
                ]
            safe = self._filled & self._named
            for path in sorted(path for path in contents if path.suffix == ".pb"):
                if path not in safe and self._random.random() < 0.5:
                    del contents[path]
        return contents

    def restore(self, image: dict[Path, bytes]) -> None:
        for path in list(self._folder.rglob("*")):
            if path.is_file() and path not in image:
                path.unlink()
        for path, data in image.items():
            if not path.is_file() or path.read_bytes() != data:
                path.write_bytes(data)
        self.synced = {path: len(data) for path, data in image.items()}
        self._filled = {path for path in image if path.suffix == ".pb"}
        self._named = set(self._filled)

    @contextlib.contextmanager
    def replaces_fsync(self) -> Iterator[None]:
        os.fsync = self.fsync
        try:
            yield
        finally:
            os.fsync = self._fsync


class OwnedJournal(Journal):
    """The product's journal; the end of its process closes its file, which frees the lock.

    Batches that it removes lie in `removed`, beside its folder, for who judges the run.
    """

    def __init__(self, folder: Path) -> None:
        process: Process | None = PROCESS.get()
        assert process is not None
        try:
            super().__init__(folder)
        finally:
            # The writer may have died half-way.
            process.files += [
                vars(self)[n] for n in ("_file", "_lock_file") if n in vars(self)
            ]

    def remove_batches(self, *, before: int) -> int:
        removed = self._folder.with_name(REMOVED)
        removed.mkdir(exist_ok=True)
        for place in self.kept_batches():
            if place[0] < before:
                shutil.copy(self.path(*place), removed)
        return super().remove_batches(before=before)


def close_files(process: Process) -> None:
    for file in process.files:
        with contextlib.suppress(OSError):
            file.close()
