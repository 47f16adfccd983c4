"""The feature table names tests that exist and places that are there; its page is up to date."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "mutants"))

from table import PAGE, Row, page, rows  # noqa: E402

ITEMS = [*range(1, 52), *range(53, 64)]

for_all_rows = pytest.mark.parametrize("row", rows(), ids=lambda row: str(row.item))


def test_every_item_has_one_row() -> None:
    assert [row.item for row in rows()] == ITEMS


def test_page_is_made_from_the_table() -> None:
    assert PAGE.read_text() == page(), "run python tests/mutants/table.py > " + str(
        PAGE
    )


@for_all_rows
def test_row_is_shown_by_tests_or_gives_a_reason(row: Row) -> None:
    assert row.tests or row.reason
    assert not row.tests or row.mutants, "tests of a row count only with a mutant"


@for_all_rows
def test_tests_of_a_row_exist(row: Row) -> None:
    for test in row.tests:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        names = {node.name for node in tree.body if isinstance(node, functions)}
        assert not name or name.partition("[")[0] in names, test


@for_all_rows
def test_places_of_a_row_are_there_once(row: Row) -> None:
    for mutant in row.mutants:
        text = (ROOT / mutant.file).read_text()
        assert text.count(mutant.find) == 1, mutant.name
        assert mutant.find != mutant.replace
        if mutant.file.endswith(".py"):
            # A file that does not parse would be noticed by any test.
            ast.parse(text.replace(mutant.find, mutant.replace))


def test_a_mutant_keeps_the_tests_that_are_to_notice_it() -> None:
    place = {"file": "a.py", "find": "x", "replace": "y"}
    entry = {
        "item": 1,
        "feature": "a feature",
        "tests": ["tests/a.py", "tests/b.py"],
        "mutants": [place, place | {"tests": ["tests/b.py"]}],
    }
    assert [mutant.tests for mutant in Row.read(entry).mutants] == [(), ("tests/b.py",)]


@for_all_rows
def test_tests_of_a_mutant_are_tests_of_its_row(row: Row) -> None:
    for mutant in row.mutants:
        for test in mutant.tests:
            assert {test, test.partition("::")[0]} & {*row.tests}, mutant.name
