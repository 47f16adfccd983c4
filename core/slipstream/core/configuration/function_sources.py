"""The sources of a user's own functions: digests, found without an import of them."""

import ast
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from slipstream.core.settings.environment_algorithm import EnvironmentAlgorithms


def source_digests(algorithms: EnvironmentAlgorithms) -> dict[str, str]:
    """Returns a digest for each function of the user's own, by its name.

    It covers the function's module and the modules in the same folder that this imports. A module
    that is not found here has none: another host may have it.
    """
    names = sorted({name for each in algorithms.distinct for name in each.own_functions.values()})
    found = {name: _digest(name.partition(":")[0]) for name in names}
    return {name: digest for name, digest in found.items() if digest}


def _digest(module: str) -> str:
    """Returns the digest of a module's sources, "" if there is no such file."""
    first = _file(module)
    if first is None:
        return ""
    files, left = {module: first}, [module]
    while left:
        name = left.pop()
        for other in _imports(files[name], name):
            file = None if other in files else _file(other)
            if file is not None and _is_beside(file, first.parent):
                files[other] = file
                left.append(other)
    found = hashlib.sha256()
    for name, file in sorted(files.items()):
        found.update(f"{name}\n".encode() + file.read_bytes())
    return found.hexdigest()


def _is_beside(file: Path, folder: Path) -> bool:
    return file.is_relative_to(folder) and "site-packages" not in file.relative_to(folder).parts


def _file(module: str) -> Path | None:
    """Returns the source of a module: in the folder of the command first, then in Python's path."""
    *packages, name = module.split(".")
    for folder in (os.getcwd(), *sys.path):
        place = Path(folder, *packages)
        for file in (place / name / "__init__.py", place / f"{name}.py"):
            if file.is_file():
                return file
    return None


def _imports(file: Path, module: str) -> Iterator[str]:
    """Yields the names that a source imports, at any depth; nothing of one that is no Python."""
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
