"""Text of others on this terminal: models, environments and servers have a say in it."""

from __future__ import annotations


def plain(text: str, *, indent: int = 0) -> str:
    """`text` with what a terminal would obey as escapes; further lines are moved to the right.

    That is every character that is not printable: controls, those that turn the writing direction,
    and lone surrogates.
    """
    lines = text.split("\n")
    return ("\n" + " " * indent).join(map(_visible, lines))


def _visible(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in line
    )
