"""Reads data sets of the Hugging Face hub; one line says why one cannot be read.

The front matter of the data set's README says what the files of a split are, else their usual names
do. Parquet and JSON lines are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.core.errors import ConfigError
from slipstream.core.hub import DATA_PREFIX, HubFiles

SUFFIXES = (".parquet", ".jsonl")
MAX_SHOWN = 20

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class HubData:
    """A split of a data set; without `revision` it is the newest, without `config` the default."""

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    @property
    def files(self) -> HubFiles:
        """The repository."""
        return HubFiles(self.name, "dataset", self.revision, shown=str(self))

    def __str__(self) -> str:
        return f"{DATA_PREFIX}{self.name}"


def read_hub_rows(data: HubData, read_file: Callable[[Path], Iterable[Row]]) -> Iterable[Row]:
    """Returns the rows of a split; what the hub was asked for once is read from its cache.

    `read_file` reads one file. Raises ConfigError, which says in one line what cannot be read.
    """
    readme = data.files.bring(["README.md"]) / "README.md"
    files = _find_files(data, _configs(readme))
    return itertools.chain.from_iterable(map(read_file, files))


def _find_files(data: HubData, configs: list[dict[str, Any]]) -> list[Path]:
    """Brings the files of the split onto this machine; returns their paths in order."""
    patterns = _patterns(data, configs)
    folder = data.files.bring(patterns)
    found = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    usable = [path for path in found if path.suffix in SUFFIXES]
    if usable and len(usable) == len(found):
        return usable
    what = f"config {data.config!r}, " if data.config else ""
    wrong = ", ".join(str(path.relative_to(folder)) for path in found[:MAX_SHOWN])
    raise ConfigError(
        f"{data} has no parquet or JSON lines for {what}split {data.split!r}"
        f"{f', only {wrong}' if wrong else ''}: write it as parquet and give the file as path"
    )


def _configs(readme: Path) -> list[dict[str, Any]]:
    """Returns the front matter's `configs`."""
    if not readme.is_file():
        return []
    from huggingface_hub import metadata_load

    found = (metadata_load(readme) or {}).get("configs", [])
    return [each for each in found if isinstance(each, dict)]


def _patterns(data: HubData, configs: list[dict[str, Any]]) -> list[str]:
    """Returns patterns of the split's files: those that `configs` name, or the usual names."""
    names = [str(each.get("config_name", "default")) for each in configs]
    name = data.config
    if name is None and len(names) > 1:
        defaults = [n for n, each in zip(names, configs, strict=True) if each.get("default")]
        defaults += [n for n in names if n == "default"]
        if not defaults:
            raise ConfigError(f"{data} has the configs {', '.join(names)}: name one of them")
        name = defaults[0]
    if configs and name is not None and name not in names:
        raise ConfigError(f"{data} has no config {name!r}; it has {', '.join(names)}")
    chosen = configs[names.index(name) if name is not None else 0] if configs else {}
    if "data_files" in chosen:
        return _named_files(data, chosen["data_files"])
    places = [str(chosen["data_dir"]).strip("/")] if "data_dir" in chosen else ["data"]
    places = [f"{place}/" for place in ([data.config, *places] if data.config else places)]
    stems = [f"{place}{data.split}" for place in ("", *places)]
    return [f"{stem}{rest}{suffix}" for stem in stems for rest in ("", "-*") for suffix in SUFFIXES]


def _named_files(data: HubData, data_files: object) -> list[str]:
    """Returns the patterns of the split in `data_files`, in any form that the hub knows."""
    if isinstance(data_files, dict):
        by_split = dict(data_files)
    elif isinstance(data_files, list) and all(isinstance(each, dict) for each in data_files):
        by_split = {str(each["split"]): each["path"] for each in data_files}
    else:
        by_split = {"train": data_files}
    if data.split not in by_split:
        raise ConfigError(f"{data} has no split {data.split!r}; it has {', '.join(by_split)}")
    paths = by_split[data.split]
    return [str(path) for path in ([paths] if isinstance(paths, str) else paths)]
