"""A disk that is slow or hangs for the processes of a test, below one folder.

The C compiler that vLLM and Triton need makes a library that is preloaded into them.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("throttled_disk.c")


class ThrottledDisk:
    """The disk below `folder`; as fast as it is until `set_rate`."""

    def __init__(self, folder: Path, tools: Path) -> None:
        """`tools`: a folder outside, for the library and the file with the rate."""
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler")
        tools.mkdir(parents=True, exist_ok=True)
        library = tools / "throttled_disk.so"
        subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True
        )
        self._rate_file = tools / "rate"
        self.environ = {
            "LD_PRELOAD": str(library),
            "THROTTLED_FOLDER": str(folder.resolve()),
            "THROTTLED_RATE": str(self._rate_file),
        }

    def set_rate(self, bytes_per_s: float) -> None:
        """Sets the rate of what follows; at 0 reads and writes hang until another one is set."""
        partial = self._rate_file.with_suffix(".partial")
        partial.write_text(f"{bytes_per_s:g}\n")
        os.replace(partial, self._rate_file)

    def release(self) -> None:
        self._rate_file.unlink(missing_ok=True)
