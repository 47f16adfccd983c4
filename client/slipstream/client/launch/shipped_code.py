"""Finds the user's modules and models, which schedulers without a shared folder must copy."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.core.configuration.roles import role_folders
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config

# Folders of Python, git and virtual environments, which are not shipped.
_LEFT = ("__pycache__", ".git", ".venv")
# A model on the hub with its revision: OWNER/NAME@REVISION.
_HUB_MODEL = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*@[\w./-]+")


@dataclass(frozen=True)
class ShippedCode:
    """The text of each file of a folder, by its path relative to the folder."""

    files: dict[str, str] = field(default_factory=dict)
    # Whether the files are already in the folder from which they are shipped.
    in_place: bool = False


def read_code(folder: Path | None, place: Path, *, most_bytes: int | None) -> ShippedCode:
    """Returns the text files of `folder`, or no files if it is None.

    If `folder` is `place`, the folder from which files are shipped, the result says that they need
    no copy. Raises ConfigError for more than `most_bytes` as JSON, and for a file that is no text.
    """
    if folder is None:
        return ShippedCode()
    if not folder.is_dir():
        raise ConfigError(f"--code {folder}: no such folder")
    files: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or any(part in _LEFT for part in name.parts):
            continue
        try:
            files[name.as_posix()] = path.read_bytes().decode()
        except UnicodeDecodeError:
            raise ConfigError(f"--code {folder}: {name} is no text; put it into a volume") from None
        except OSError as error:
            raise ConfigError(f"--code {folder}: {name}: {error.strerror}") from error
    size = len(json.dumps(files, ensure_ascii=False).encode())
    if most_bytes is not None and size > most_bytes:
        raise ConfigError(
            f"--code {folder} makes a ConfigMap of {size:,} bytes, at most {most_bytes:,} can be "
            "applied: put what is large into a volume"
        )
    return ShippedCode(files, folder.resolve() == place.resolve())


def left_behind(config: Config, code: ShippedCode) -> list[str]:
    """Returns the modules that settings name, if they are in the working directory but not shipped.

    Modules are named by environments, evaluations and the user's own functions of algorithms.
    """
    references = [played.reference for played in (*config.environments, *config.evaluations)]
    for each in config.algorithms.distinct:
        references += each.own_functions.values()
    found = []
    for module in sorted({reference.partition(":")[0] for reference in references}):
        name = module.replace(".", "/")
        names = (f"{name}.py", f"{name}/__init__.py")
        if any(Path(each).is_file() for each in names) and not any(
            each in code.files for each in names
        ):
            found.append(module)
    return found


def model_folders(config: Config) -> dict[str, Path]:
    """Returns the folder of each model by its setting; models given by hub name are left out.

    Raises ConfigError if two folders have the same name, since machines get them by name.
    """
    settings = {"model.path": config.model.path}
    settings |= {f"{name}.path": path for name, path in role_folders(config)}
    found = {k: path for k, path in settings.items() if not _HUB_MODEL.fullmatch(str(path))}
    names = {path.name: path for path in found.values()}
    for setting, path in found.items():
        if names[path.name] != path:
            raise ConfigError(
                f"{setting} must end with a name of its own, got {path} beside {names[path.name]}"
            )
    return found
