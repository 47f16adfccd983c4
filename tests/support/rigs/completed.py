"""Programs that a test waits for."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# No test judges how long a program takes: this only ends one that hangs.
LIMIT_S = 300.0


def completed(
    command: Sequence[str | Path], *, check: bool = False, **more: Any
) -> subprocess.CompletedProcess[str]:
    """What a command has written and its exit code, when it has ended."""
    more = {"timeout": LIMIT_S} | more
    return subprocess.run(command, capture_output=True, text=True, check=check, **more)


def python(code: str, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """The same of Python code in a process of its own."""
    return completed([sys.executable, "-c", code, *arguments], **more)
