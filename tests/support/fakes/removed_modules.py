"""Removes modules from programs that tests start: whoever imports one fails.

`install` writes a `sitecustomize` into a folder, which Python imports at its start if the folder
lies on PYTHONPATH.
"""

from collections.abc import Sequence
from pathlib import Path

_HOOK = """
import importlib.abc
import sys

REMOVED = {removed!r}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if any(name == each or name.startswith(each + ".") for each in REMOVED):
            raise ModuleNotFoundError(f"{{name}} is removed", name=name)
        return None


sys.meta_path.insert(0, Finder())
"""


def install(folder: Path, removed: Sequence[str]) -> Path:
    """Writes the hook; returns the folder for PYTHONPATH."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_HOOK.format(removed=(*removed,)))
    return folder
