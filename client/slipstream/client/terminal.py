"""Prints lines to this terminal, with text of models, environments and servers made safe."""

import errno
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from slipstream.client.log_lines import record
from slipstream.core.errors import RunFailed


def plain(text: str, *, indent: int = 0) -> str:
    """Returns `text` with escapes for all characters that a terminal would interpret.

    Every character that is not printable is escaped: controls, characters that turn the writing
    direction, and lone surrogates. Lines after the first are indented by `indent` spaces.
    """
    shown = (
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode()
        for character in text
    )
    return "".join(shown).replace("\n", "\n" + " " * indent)


def say(text: str, *, as_it_is: bool = False) -> None:
    """Prints `plain(text)` to stdout; ignores that stdout is closed, as when piped to `head`.

    With `as_it_is` it prints the text itself, as settings that a program may read. Raises RunFailed
    if stdout cannot be written for another reason, such as a full disk.
    """
    try:
        print(text if as_it_is else record(text) or plain(text), flush=True)
    except OSError as error:
        discard(sys.stdout)
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise RunFailed(f"stdout cannot be written: {error.strerror}") from error


def complain(cause: str) -> None:
    """Writes the cause of a failure to stderr; ignores an OSError of that write."""
    try:
        line = record(cause, logging.ERROR) or plain(f"slipstream: {cause}")
        print(line, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Redirects `stream` to /dev/null, so that the interpreter's flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def this_command() -> str:
    """Returns the command line of this program, quoted for a shell in the same folder."""
    program, *arguments = sys.argv
    if not arguments:
        # A call in Python.
        return program
    if Path(program).name != "slipstream":
        return shlex.join([sys.executable, "-m", "slipstream.client.cli", *arguments])
    if shutil.which("slipstream") == os.path.abspath(program):
        program = "slipstream"
    return shlex.join([program, *arguments])


def counted(number: int, what: str) -> str:
    """Returns the number and the noun, in the plural if needed: 1 task, 2 tasks."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row of a table, with all cells of a column of the same width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
