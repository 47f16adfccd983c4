"""Shows what a run has learnt: replies to held-out prompts at its start, now, and the right ones.

The replies are those of heldout.jsonl, which has the same prompts in each evaluation round.
"""

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.client.run_folder import lines_of, parsed
from slipstream.client.terminal import plain
from slipstream.core.machine.files import open_regular, read_regular
from slipstream.core.run_folder import HELDOUT

Row: TypeAlias = Mapping[str, Any]
# The evaluation and the index of a task.
Place: TypeAlias = tuple[str, object]

TOKENIZER = "tokenizer.json"
# Most bytes of a tokenizer's file.
MOST_BYTES = 256 << 20
# Most characters of a prompt, and of a reply, in a line.
PROMPT_CHARACTERS = 28
REPLY_CHARACTERS = 22


@dataclass(frozen=True)
class Comparison:
    """A held-out prompt with a reply of the first round, one of the newest, and the right one."""

    evaluation: str
    prompt: str
    first_version: int
    first_reply: str
    newest_version: int
    newest_reply: str
    # "" if the environment tells none.
    right_reply: str


def comparison_lines(folder: Path, model: Path, most: int) -> list[str]:
    """Returns lines of a table of `most` held-out prompts; none without two rounds."""
    special = special_texts(model)
    comparisons = list(
        itertools.islice(
            compared(folder, special),
            most,
        )
    )
    if not comparisons:
        return []
    newest = comparisons[0]
    heads = [
        "held out",
        f"at version {newest.first_version}",
        f"at version {newest.newest_version}",
        "asked for",
    ]
    rows = [
        [
            _end(row.prompt),
            _beginning(row.first_reply),
            _beginning(row.newest_reply),
            _beginning(row.right_reply),
        ]
        for row in comparisons
    ]
    if not any(row.right_reply for row in comparisons):
        heads.pop()
        for row in rows:
            row.pop()
    return list(_table([heads, *rows]))


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    for row in rows:
        cells = [
            cell.ljust(width)
            for cell, width in zip(
                row,
                widths,
                strict=True,
            )
        ]
        yield "  ".join(cells).rstrip()


def compared(folder: Path, special: Collection[str]) -> Iterator[Comparison]:
    """Yields the prompts that the first and the newest round of a run have in common."""
    first: dict[Place, Row] = {}
    newest: dict[Place, Row] = {}
    for row in rows_of(folder):
        evaluation = str(row.get("evaluation"))
        place = (evaluation, row.get("task_index"))
        first.setdefault(place, row)
        newest[place] = row
    versions = [_version(row) for row in newest.values()]
    last_version = max(versions, default=0)
    for place, row in newest.items():
        earlier = first[place]
        if _version(earlier) < _version(row) == last_version:
            yield Comparison(
                evaluation=place[0],
                prompt=_text(row, "prompt", special),
                first_version=_version(earlier),
                first_reply=_text(earlier, "reply", special),
                newest_version=_version(row),
                newest_reply=_text(row, "reply", special),
                right_reply=_text(row, "answer", special),
            )


def _text(row: Row, name: str, special: Collection[str]) -> str:
    text = row.get(name) or ""
    return without_special(str(text), special)


def _version(row: Row) -> int:
    return int(row["evaluation_step"])


def rows_of(folder: Path) -> Iterator[Row]:
    """Yields the whole lines of heldout.jsonl; none if there is no such file."""
    with contextlib.suppress(OSError), open_regular(folder / HELDOUT) as file:
        for line in lines_of(file):
            row = parsed(line)
            if isinstance(row, dict) and isinstance(row.get("evaluation_step"), int):
                yield row


def special_texts(model: Path) -> list[str]:
    """Returns the special tokens of a model's tokenizer, the longest first; none without a file."""
    try:
        content = read_regular(
            model / TOKENIZER,
            most_bytes=MOST_BYTES,
        )
        tokenizer: Any = parsed(content)
        tokens = [token["content"] for token in tokenizer["added_tokens"] if token["special"]]
    except (OSError, KeyError, TypeError):
        return []
    return sorted(filter(None, tokens), key=len, reverse=True)


def without_special(text: str, special: Iterable[str]) -> str:
    """Returns `text` on one line, without the special tokens of a chat template."""
    for token in special:
        text = text.replace(token, " ")
    return plain(" ".join(text.split()))


def _beginning(text: str) -> str:
    """Returns the first characters of a reply, or "-" for none."""
    if len(text) <= REPLY_CHARACTERS:
        return text or "-"
    return text[: REPLY_CHARACTERS - 1] + "…"


def _end(text: str) -> str:
    """Returns the last characters of a prompt, behind which its reply begins."""
    if len(text) <= PROMPT_CHARACTERS:
        return text
    return "…" + text[1 - PROMPT_CHARACTERS :]
