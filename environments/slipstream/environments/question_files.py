"""Reads questions and answers from files and from the hub, and says what is wrong in them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slipstream.client.environment import Message
from slipstream.core.errors import ConfigError
from slipstream.environments.hub_data import HubData, read_hub_rows

# A cell: text, or any value of JSON.
Cell: TypeAlias = Any
Row: TypeAlias = Mapping[str, Cell]

MAX_SHOWN_COLUMNS = 20


@dataclass(frozen=True)
class Question:
    """One row: what the model reads, and the right answer as text."""

    messages: tuple[Message, ...]
    # "" if no column was named for it.
    answer: str
    row: Row = field(default_factory=dict, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The last message, which asks."""
        return self.messages[-1].text


def read_questions(
    path: Path | HubData,
    question: str,
    answer: str | None,
    *,
    duplicates: Literal["refuse", "drop"],
) -> list[Question]:
    """Returns the questions of a file or of a data set on the hub in its order, each once.

    `question` and `answer` name columns; a dot leads into a column of objects. A question is a
    text, or a list of messages with role and content. Without `answer` no column is read for it.
    Raises ConfigError, which names the row, or the columns that exist, when the file cannot be
    used.
    """
    found: dict[tuple[Message, ...], tuple[int, Question]] = {}
    for number, row in enumerate(read_rows(path), start=1):
        where = f"{path}, row {number}"
        messages = _messages(_cell(row, question, path), f"{where}: column {question!r}")
        right = ""
        if answer is not None:
            right = _text(_cell(row, answer, path), f"{where}: column {answer!r}")
        if messages not in found:
            found[messages] = (number, Question(messages, right, row))
        elif duplicates == "refuse":
            raise ConfigError(
                f"{path}: rows {found[messages][0]} and {number} ask the same question; "
                f"duplicates='drop' keeps the first"
            )
    if not found:
        raise ConfigError(f"{path} has no rows")
    return [one for _, one in found.values()]


def read_rows(path: Path | HubData) -> Iterable[Row]:
    """Returns the rows of a .jsonl or .parquet file, or of a data set on the hub.

    Raises ConfigError, which names what is wrong in it.
    """
    if isinstance(path, HubData):
        return read_hub_rows(path, read_rows)
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {what}; the working directory is {Path.cwd()}")
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


def _cell(row: Row, column: str, path: Path | HubData) -> Cell:
    if column in row:
        return row[column]
    place: Cell = row
    for part in column.split("."):
        if not isinstance(place, Mapping) or part not in place:
            names = [repr(name) for name in list(row)[:MAX_SHOWN_COLUMNS]]
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
    """Returns one of a column's messages.

    Raises ConfigError for one whose role or content is no text.
    """
    if not isinstance(cell, Mapping) or not {"role", "content"} <= set(cell):
        raise ConfigError(f"{where} must hold messages with role and content")
    for name in ("role", "content"):
        if not isinstance(cell[name], str):
            raise ConfigError(
                f"{where}: the {name} of a message must be a text, got {str(cell[name])[:60]}"
            )
    return Message(cell["role"], cell["content"])


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
