"""Reads questions and answers from files and hub data sets, and reports faults in them.

The front matter of a data set's README may name the files of a split; otherwise, files with the
usual names are read. All files are Parquet or JSON lines.
"""

from __future__ import annotations

import glob
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slipstream.client.environment import Message
from slipstream.core.errors import ConfigError
from slipstream.core.hub import DATA_PREFIX, HubFiles
from slipstream.environments.answers import bare

# What may be the name of a data set on the hub.
_NAME = re.compile(r"[\w.-]+/[\w-]+")
SUFFIXES = (".parquet", ".jsonl")
# Most files or columns that a message names.
MAX_SHOWN = 20

# A cell: text, or any value of JSON.
Cell: TypeAlias = Any
Row: TypeAlias = Mapping[str, Cell]


@dataclass(frozen=True)
class HubData:
    """A split of a data set on the hub; None means the default config or newest revision."""

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    @property
    def files(self) -> HubFiles:
        """The files of the data set's repository on the hub."""
        return HubFiles(self.name, "dataset", self.revision, shown=str(self))

    def __str__(self) -> str:
        return f"{DATA_PREFIX}{self.name}"


class Files(tuple[Path, ...]):
    """Files whose rows follow each other."""

    @classmethod
    def of(cls, paths: Sequence[str]) -> Files:
        """Returns the files of paths and patterns such as data/*.jsonl, the latter in their order.

        Raises ConfigError if there is no path, or no file for a pattern.
        """
        if not paths or not all(isinstance(path, str) for path in paths):
            raise ConfigError(f"path must be a file, a pattern or a list of these, got {paths!r}")
        return cls(Path(name) for path in paths for name in _matching(path))

    def __str__(self) -> str:
        return ", ".join(map(str, self))


def _matching(path: str) -> list[str]:
    if path.startswith(DATA_PREFIX):
        raise ConfigError(f"a data set of the hub stands alone in path, got {path!r} in a list")
    if Path(path).exists() or not glob.has_magic(path):
        return [path]
    found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise ConfigError(f"no file matches {path}; the working directory is {Path.cwd()}")
    return found


def _find_files(data: HubData) -> list[Path]:
    """Downloads the files of the split unless they are in the hub's cache; returns their paths.

    Raises ConfigError with one line if a download fails, if there is no file, or if a file has an
    unknown format.
    """
    patterns = _patterns(data, _configs(data.files.bring(["README.md"]) / "README.md"))
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
    """Returns `configs` from the front matter of a README, or [] if it has none."""
    if not readme.is_file():
        return []
    from huggingface_hub import metadata_load

    found = (metadata_load(readme) or {}).get("configs", [])
    return [each for each in found if isinstance(each, dict)]


def _patterns(data: HubData, configs: list[dict[str, Any]]) -> list[str]:
    """Returns glob patterns of the split's files: those named in `configs`, or the usual names."""
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
    """Returns the split's glob patterns in `data_files`, which has any form that the hub allows."""
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


@dataclass(frozen=True)
class Question:
    """One row: what the model reads, and the right answer as text."""

    messages: tuple[Message, ...]
    # The right answer, or "" if no column has it.
    answer: str
    row: Row = field(default_factory=dict, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The text of the last message, which asks the question."""
        return self.messages[-1].text

    @property
    def identity(self) -> str:
        """The roles and texts of all messages, by which a split knows the question."""
        return "\0".join(f"{message.role}\0{message.content}" for message in self.messages)


def read_questions(
    path: Path | HubData | Files,
    question: str,
    answer: str | None,
    *,
    duplicates: Literal["refuse", "drop"],
    answer_after: str | None = None,
) -> list[Question]:
    """Returns the questions of a file or of a hub data set in their order, each once.

    `question` and `answer` name columns; "a.b" is the field b of the objects in column a. A
    question is a text, or a list of messages with role and content. If `answer` is None, answers
    are "". `duplicates` says whether a repeated question is an error or is dropped. Only what
    follows the last `answer_after` in an answer is kept. If the file cannot be used, raises
    ConfigError, which names the row, or the columns that exist.
    """
    found: dict[tuple[Message, ...], tuple[int, Question]] = {}
    for number, (where, row) in enumerate(named_rows(path), start=1):
        messages = _messages(_cell(row, question, path), f"{where}: column {question!r}")
        right = ""
        if answer is not None:
            right = _text(_cell(row, answer, path), f"{where}: column {answer!r}")
            right = right.rpartition(answer_after)[2].strip() if answer_after else right
            if not bare(right):
                what = f"nothing behind {answer_after!r}" if answer_after else "no answer but marks"
                raise ConfigError(f"{where}: column {answer!r} has {what}")
        if messages not in found:
            found[messages] = (number, Question(messages, right, row))
        elif duplicates == "refuse":
            raise ConfigError(
                f"{path}: rows {found[messages][0]} and {number} ask the same question; "
                f"duplicates='drop' keeps the first"
            )
    return [one for _, one in found.values()]


def named_rows(path: Path | HubData | Files) -> Iterator[tuple[str, Row]]:
    """Yields rows of `read_rows`, each with its name in errors. Raises ConfigError without any."""
    if isinstance(path, Files):
        yield from itertools.chain.from_iterable(map(named_rows, path))
        return
    number = 0
    for number, row in enumerate(read_rows(path), start=1):
        yield f"{path}, row {number}", row
    if not number:
        raise ConfigError(f"{path} has no rows")


def read_rows(path: Path | HubData) -> Iterable[Row]:
    """Returns the rows of a .jsonl or .parquet file, or of a data set on the hub.

    Raises ConfigError, which names the fault. A .jsonl file is read during the iteration, so a
    fault in it is raised then.
    """
    if isinstance(path, HubData):
        return itertools.chain.from_iterable(map(read_rows, _find_files(path)))
    if not path.is_file():
        what = "is a pipe or a device, no regular file" if path.exists() else "does not exist"
        what = "is a folder, not a file" if path.is_dir() else what
        hint = f"; on the hub: {DATA_PREFIX}{path}" if _NAME.fullmatch(str(path)) else ""
        raise ConfigError(f"{path} {what}; the working directory is {Path.cwd()}{hint}")
    match path.suffix:
        case ".jsonl":
            return _json_lines(path)
        case ".parquet":
            return _parquet(path)
    raise ConfigError(f"the name of a file of questions ends in .jsonl or .parquet, got {path}")


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                # Some editors begin a file with a byte order mark.
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path} must be UTF-8, but line {number} is not") from error
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, line {number} is no JSON object")
            yield row


def _parquet(path: Path) -> Sequence[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path} needs the package pyarrow: pip install pyarrow") from error
    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    return rows


def _cell(row: Row, column: str, path: Path | HubData | Files) -> Cell:
    if column in row:
        return row[column]
    place: Cell = row
    for part in column.split("."):
        if not isinstance(place, Mapping) or part not in place:
            names = [repr(name) for name in list(row)[:MAX_SHOWN]]
            raise ConfigError(
                f"{path} has no column {column!r}; its columns are {', '.join(names)}"
            )
        place = place[part]
    return place


def _messages(cell: Cell, where: str) -> tuple[Message, ...]:
    if not isinstance(cell, list):
        return (Message("user", _text(cell, where)),)
    if not cell:
        raise ConfigError(f"{where} is empty")
    return tuple(message_of(message, where) for message in cell)


def message_of(cell: Cell, where: str) -> Message:
    """Returns the message in one object of a column; `where` names the object in errors.

    Raises ConfigError if its role or content is no text.
    """
    if not isinstance(cell, Mapping) or not {"role", "content"} <= set(cell):
        raise ConfigError(f"{where} must hold messages with role and content")
    for name in ("role", "content"):
        if not isinstance(cell[name], str):
            raise ConfigError(
                f"{where}: the {name} of a message must be a text, got {str(cell[name])[:60]}"
            )
    return Message(cell["role"], cell["content"])


def text_in(row: Row, column: str, where: str, *, may_be_empty: bool = False) -> str:
    """Returns the text in a column. Raises ConfigError, which names the columns, without a text."""
    text = row.get(column)
    if not isinstance(text, str) or not (text.strip() or may_be_empty):
        raise ConfigError(
            f"{where}: column {column!r} must hold a text, got {text!r}; the columns are "
            f"{', '.join(map(repr, row))}"
        )
    return text


def text_of(cell: Cell, where: str) -> str:
    """Returns a text, or a number as text. Raises ConfigError for a list, an object or bytes."""
    if isinstance(cell, list | Mapping | bytes):
        raise ConfigError(f"{where} must hold a text, got {str(cell)[:60]}")
    return str(cell)


def _text(cell: Cell, where: str) -> str:
    text = "" if cell is None else text_of(cell, where).strip()
    if not text:
        raise ConfigError(f"{where} is empty")
    return text
