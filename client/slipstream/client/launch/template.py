"""Fills in the templates of scheduler files, and quotes the shell commands in them."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

_PLAIN = re.compile(r"[\w@%+=:,./-]+")


class _Marked(Template):
    """A text in which @{NAME} is replaced by a value, and ${NAME} stays as it is."""

    delimiter = "@"


def filled_template(path: Path, **values: object) -> str:
    """Returns the template at `path` with `values` filled in; raises KeyError if one is missing."""
    return _Marked(path.read_text()).substitute(values)


def shell_command(command: list[str], *, indent: int) -> str:
    """Returns a command for a shell script, with one line for each setting and option.

    Lines after the first are indented by `indent` spaces.
    """
    words = [shell_word(word) for word in command]
    joint = " \\\n" + " " * indent
    return joint.join([" ".join(words[:3]), *words[3:]])


def shell_word(word: str) -> str:
    """Returns `word` quoted for a shell script; ${NAME} in it stays a variable."""
    if _PLAIN.fullmatch(word):
        return word
    escaped = re.sub(r'(["\\`]|\$(?!\{[A-Z_]+\}))', r"\\\1", word)
    return f'"{escaped}"'
