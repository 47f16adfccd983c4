"""Reads tests of functions from files, and says what is wrong in them."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.environments.question_files import Row, read_rows

_CHECK = re.compile(r"^def check\(", re.MULTILINE)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Exam:
    """One task: the question, the tests, what runs before them, and the functions' names."""

    question: str
    setup: str
    tests: tuple[str, ...]
    functions: tuple[str, ...]


@dataclass(frozen=True)
class Columns:
    """Names of columns. Without `function` the names that tests use and do not define count."""

    question: str
    tests: str
    setup: str | None = None
    function: str | None = None


def read_exams(path: Path, columns: Columns) -> list[Exam]:
    """Returns the tasks of a .jsonl or .parquet file in its order."""
    found = [
        _read_exam(row, columns, f"{path}, row {number}")
        for number, row in enumerate(read_rows(path), start=1)
    ]
    if not found:
        raise ConfigError(f"{path} has no rows")
    return found


def _read_exam(row: Row, columns: Columns, where: str) -> Exam:
    question = _text(row, columns.question, where)
    setup = "" if columns.setup is None else _text(row, columns.setup, where, may_be_empty=True)
    function = None if columns.function is None else _text(row, columns.function, where)
    tests = row.get(columns.tests)
    tests = [tests] if isinstance(tests, str) else tests
    if not (isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests)):
        raise ConfigError(
            f"{where}: column {columns.tests!r} must hold a test or a list of tests, each a text "
            f"of Python; the columns are {', '.join(map(repr, row))}"
        )
    if function is None and any(map(_CHECK.search, tests)):
        raise ConfigError(
            f"{where}: a test defines check(): name the column with the function's name, as "
            f"function = 'entry_point'"
        )
    tests = [f"{test}\n\ncheck({function})\n" if _CHECK.search(test) else test for test in tests]
    names = (function,) if function else _names_under_test(setup, tests, where)
    return Exam(question, setup, tuple(tests), names)


def _text(row: Row, column: str, where: str, *, may_be_empty: bool = False) -> str:
    text = row.get(column)
    if not isinstance(text, str) or not (text.strip() or may_be_empty):
        raise ConfigError(
            f"{where}: column {column!r} must hold a text, got {text!r}; the columns are "
            f"{', '.join(map(repr, row))}"
        )
    return text


def _names_under_test(setup: str, tests: Sequence[str], where: str) -> tuple[str, ...]:
    """Returns the names that tests use, and that neither they, the setup nor Python define."""
    used: set[str] = set()
    defined = set(dir(builtins))
    for text in (setup, *tests):
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"{where}: a test is no Python: {error}") from error
        for node in nodes:
            if isinstance(node, _DEFINITIONS):
                defined.add(node.name)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, ast.alias):
                defined.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
    names = tuple(sorted(used - defined))
    if not names:
        raise ConfigError(f"{where}: the tests use no name that they do not define themselves")
    return names
