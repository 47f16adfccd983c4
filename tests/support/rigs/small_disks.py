"""A disk that is soon full, for tests of programs that write to it."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, limit: str) -> Iterator[Path]:
    """Mounts a tmpfs with an option such as "size=1m" at `folder`; skips where that is refused."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", limit, "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine mounts nothing")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
