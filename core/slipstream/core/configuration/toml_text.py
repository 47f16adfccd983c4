"""Reads TOML that somebody wrote, however odd: deep tables, long keys and huge numbers included."""

import re
import tomllib
from typing import TypeAlias

from pydantic import JsonValue
from slipstream.core.errors import ConfigError

Table: TypeAlias = dict[str, JsonValue]

# Strings and words of a TOML text, dots, and all other marks.
_TOKEN = re.compile(r"""\.|"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|[\w-]+|[^\s\w.'"-]+""")
# tomllib needs the square of the time for a key of more parts.
MAX_KEY_PARTS = 100
# TOML's counterparts of words of Python, which has no value that stands for none.
WORDS = {"True": "true", "False": "false", "None": "by leaving the line out"}
_PYTHON_WORD = re.compile(r"[=\[,]\s*(True|False|None)\b")
# Largest depth of tables and lists in settings.
MOST_DEEP = 32


def parse_toml(text: str) -> Table:
    """Returns the tables of a TOML text, in bounded time; raises ValueError if it is none."""
    num_dots = 0
    was_dot = False
    for token in _TOKEN.finditer(text):
        is_dot = token[0] == "."
        # Between two dots of one key there is one word or string.
        num_dots = num_dots + is_dot if is_dot != was_dot else 0
        was_dot = is_dot
        if num_dots >= MAX_KEY_PARTS:
            raise ValueError(f"a key has more than {MAX_KEY_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def word_hint(text: str, error: ValueError) -> str:
    """Returns what to write for a word of Python in the line that `error` names, or ""."""
    line = re.search(r"at line (\d+)", str(error))
    lines = text.split("\n")
    if line is None or int(line[1]) > len(lines):
        return ""
    word = _PYTHON_WORD.search(lines[int(line[1]) - 1])
    if word is None:
        return ""
    return f": {word[1]} is written {WORDS[word[1]]}"


def check_values(table: JsonValue, source: str) -> None:
    """Raises ConfigError, which names the setting, for too deep values and too large numbers."""
    waiting: list[tuple[str, int, JsonValue]] = [("", 0, table)]
    while waiting:
        place, depth, value = waiting.pop()
        if depth > MOST_DEEP:
            raise ConfigError(
                f"{source}: {place[:40]}... is nested more than {MOST_DEEP} tables or lists deep"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            place_in_source = f"{source}: {place}" if place else source
            what = f"got a number of {value.bit_length()} bits"
            raise ConfigError(f"{place_in_source} must fit 64 bits, {what}")
        inner: list[tuple[object, JsonValue]] = []
        if isinstance(value, dict):
            inner = list(value.items())
        elif isinstance(value, list):
            inner = list(enumerate(value))
        waiting += [(f"{place}.{key}".lstrip("."), depth + 1, item) for key, item in inner]
