"""Makes text of models, environments and servers safe for this terminal."""

from __future__ import annotations

import os
import sys


def plain(text: str, *, indent: int = 0) -> str:
    """Returns `text` with escapes for all that a terminal would obey; indents further lines.

    Every character that is not printable is escaped: controls, characters that turn the writing
    direction, and lone surrogates.
    """
    lines = text.split("\n")
    return ("\n" + " " * indent).join(map(_visible, lines))


def say(text: str) -> None:
    """Prints a line; a closed stdout, as behind `head`, is no failure."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The interpreter flushes again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def counted(number: int, what: str) -> str:
    """Returns the number and the noun, in the plural if needed: 1 task, 2 tasks."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _visible(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in line
    )
