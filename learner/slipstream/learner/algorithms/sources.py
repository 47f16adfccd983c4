"""The digest of the source of one's own functions."""

from __future__ import annotations

import ast
import hashlib
import sys
from pathlib import Path

from slipstream.learner.algorithms.functions import Function


def source_digest(function: Function) -> str:
    """Returns the sha256 of the function's module and of all that it imports from its folder.

    The modules are loaded. A built-in function has the digest of its own module and those beside
    it, too.
    """
    call = function.call.func  # type: ignore[attr-defined]
    files = {Path(call.__code__.co_filename): None}
    folder = next(iter(files)).parent
    # The dictionary grows while it is read.
    for file in (waiting := list(files)):
        for node in ast.walk(ast.parse(file.read_bytes())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
                if node.level:
                    names += [alias.name for alias in node.names]
            for name in names:
                for path in _files(name, folder):
                    if path not in files:
                        files[path] = None
                        waiting.append(path)
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _files(name: str, folder: Path) -> list[Path]:
    """Returns the files below `folder` of loaded modules whose name is, or ends with, `name`."""
    found = []
    for known, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and (known == name or known.endswith(f".{name}")):
            path = Path(file)
            if path.is_relative_to(folder) and path.suffix == ".py":
                found.append(path)
    return found
