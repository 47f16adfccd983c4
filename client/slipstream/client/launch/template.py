"""Files that are mostly fixed text: @{NAME} stands for a value, and ${NAME} for itself."""

from __future__ import annotations

from pathlib import Path
from string import Template


class _Marked(Template):
    """A text with @{NAME} in it."""

    delimiter = "@"


def filled_template(path: Path, **values: object) -> str:
    """Returns the text of a file with these values; raises KeyError if it needs another."""
    return _Marked(path.read_text()).substitute(values)
