"""Digests of the sources of a user's own functions, computed without importing them."""

import ast
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# Folders of installed packages, which are independent of each other.
INSTALLED = ("site-packages", "dist-packages")


def source_digests(functions: Iterable[str]) -> dict[str, str]:
    """Returns the digest of each of the user's own functions, by its name "module:function".

    A digest covers the function's module, its packages and the modules that these import from the
    same folder of `sys.path`; for an installed module, from the same package only. A function whose
    module is not found on this host is left out: another host may have it.
    """
    digests = {}
    for function in sorted(set(functions)):
        module = function.partition(":")[0]
        folders = (Path(place) for place in (os.getcwd(), *sys.path))
        folder = next((place for place in folders if _file(module, place)), None)
        if folder is None:
            continue
        package = module.partition(".")[0] if folder.name in INSTALLED else None
        files: dict[str, Path] = {}
        waiting = [module]
        while waiting:
            name = waiting.pop()
            file = _file(name, folder)
            if file is None or name in files or package not in (None, name.partition(".")[0]):
                continue
            files[name] = file
            for other in (name, *_imports(file, name)):
                parts = other.split(".")
                waiting += [".".join(parts[:size]) for size in range(1, len(parts) + 1)]
        digest = hashlib.sha256()
        for name, file in sorted(files.items()):
            digest.update(f"{name}\n".encode() + file.read_bytes())
        digests[function] = digest.hexdigest()
    return digests


def _file(module: str, folder: Path) -> Path | None:
    """Returns the source file of a module in a folder of `sys.path`, or None if there is none."""
    place = folder.joinpath(*module.split("."))
    for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
        if file.is_file():
            return file
    return None


def _imports(file: Path, module: str) -> Iterator[str]:
    """Yields the absolute names that `file` imports anywhere, or none if it cannot be parsed."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
