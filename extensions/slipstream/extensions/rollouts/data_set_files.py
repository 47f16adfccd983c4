"""The files of a data set of rollouts, which are there whole or not at all."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from slipstream.core.errors import ConfigError
from slipstream.core.machine.new_file import new_file

Row: TypeAlias = dict[str, Any]
WriteRow: TypeAlias = Callable[[Row], None]

SUFFIXES = (".parquet", ".jsonl")
# Rows of a parquet file that are in memory together, and the most characters of their texts.
_ROWS = 512
_CHARACTERS = 16 << 20


@contextlib.contextmanager
def open_rows(path: Path) -> Iterator[WriteRow]:
    """Opens a data set in the block, which gets a function that writes a row.

    The file is as that of `new_file`. Raises ConfigError for a file that is there by the end, or a
    missing pyarrow.
    """
    rows = _parquet if path.suffix == ".parquet" else _json_lines
    with new_file(path, print) as file, rows(file) as write:
        yield write


@contextlib.contextmanager
def _json_lines(file: BinaryIO) -> Iterator[WriteRow]:
    def write(row: Row) -> None:
        # A field without a value is left out of a message, as other writers do.
        messages = row["messages"]
        if messages is not None:
            messages = [
                {name: value for name, value in message.items() if value is not None}
                for message in messages
            ]
        line = json.dumps({**row, "messages": messages}, ensure_ascii=False)
        file.write(f"{line}\n".encode())

    yield write


@contextlib.contextmanager
def _parquet(file: BinaryIO) -> Iterator[WriteRow]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetWriter
    except ModuleNotFoundError as error:
        raise ConfigError("a parquet file needs pyarrow: pip install pyarrow") from error
    schema = _schema()
    waiting: list[Row] = []
    num_characters = 0

    def flush() -> None:
        nonlocal num_characters
        if waiting:
            writer.write_table(pyarrow.Table.from_pylist(waiting, schema=schema))
        waiting.clear()
        num_characters = 0

    def write(row: Row) -> None:
        nonlocal num_characters
        waiting.append(row)
        num_characters += len(row["prompt"]) + sum(len(reply["text"]) for reply in row["replies"])
        if len(waiting) >= _ROWS or num_characters >= _CHARACTERS:
            flush()

    with ParquetWriter(file, schema) as writer:
        yield write
        flush()


def _schema() -> Any:  # noqa: ANN401 - pyarrow's own
    from pyarrow import float64, int64, list_, schema, string, struct

    def rows_of(**fields: Any) -> Any:  # noqa: ANN401 - types of pyarrow
        return list_(struct([*fields.items()]))

    return schema(
        {
            "step": int64(),
            "trajectory_id": string(),
            "group_id": string(),
            "member": int64(),
            "branch": int64(),
            "branch_name": string(),
            "environment": string(),
            "task_index": int64(),
            "status": string(),
            "answer": string(),
            "metrics": rows_of(name=string(), value=float64()),
            "messages": rows_of(role=string(), content=string(), weight=int64()),
            "unreadable": string(),
            "prompt": string(),
            "replies": rows_of(
                text=string(),
                content=string(),
                thoughts=string(),
                sampled_tokens=int64(),
                reward=float64(),
            ),
            "reward": float64(),
            "prompt_tokens": int64(),
            "sampled_tokens": int64(),
            "versions": rows_of(tokens=int64(), version=string()),
            "lag": float64(),
        }
    )
