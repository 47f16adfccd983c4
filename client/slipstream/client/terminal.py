"""Text of others on this terminal: models, environments and servers have a say in it."""

from __future__ import annotations

import os
import sys


def plain(text: str, *, indent: int = 0) -> str:
    """`text` with what a terminal would obey as escapes; further lines are moved to the right.

    That is every character that is not printable: controls, those that turn the writing direction,
    and lone surrogates.
    """
    lines = text.split("\n")
    return ("\n" + " " * indent).join(map(_visible, lines))


def say(text: str) -> None:
    """Prints a line; that nobody reads it any more, as behind `head`, is no failure."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The interpreter flushes again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def counted(number: int, what: str) -> str:
    """`number` of things: 1 task, 2 tasks."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _visible(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in line
    )
