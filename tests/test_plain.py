"""Each file is at least as plain as it was, and a new one is as plain as the goals ask."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import plain
import pytest

PRODUCT_FILE = plain.ROOT / "core" / "example.py"
DENSE_LINE = (
    "total = (first + second) * (third - fourth) / max(fifth, sixth, seventh)\n"
)


def problems(text: str, budget: plain.Budget | None = None) -> list[str]:
    """The problems of a product's file."""
    counts = plain.count(text)
    return list(plain.problems(PRODUCT_FILE, counts, budget or {}))


def num_places(counts: plain.Counts) -> dict[str, int]:
    """How many places of each kind there are, where there are any."""
    numbers = {kind: len(getattr(counts, kind)) for kind in plain.PLACES}
    return {kind: number for kind, number in numbers.items() if number}


def test_no_file_is_less_plain_than_its_budget() -> None:
    budgets = plain.read_budgets(plain.BUDGETS.read_text())
    lines: list[str] = []
    for path in plain.repository_files():
        name = str(path.relative_to(plain.ROOT))
        counts = plain.count(path.read_text())
        lines.extend(plain.problems(path, counts, budgets.get(name, {})))
    lines.append("CONTRIBUTING.md says under Names what a name is for")
    assert len(lines) == 1, "\n".join(lines)


def test_budgets_are_of_files_that_exist_in_the_order_of_their_paths() -> None:
    text = plain.BUDGETS.read_text()
    budgets = plain.read_budgets(text)
    missing = [path for path in budgets if not (plain.ROOT / path).exists()]
    assert not missing, f"python tests/plain.py --tighten removes {missing}"
    paths = list(budgets)
    assert paths == sorted(paths)


@pytest.mark.parametrize(
    ("text", "kind", "advice"),
    [
        ("found = 1\n", "nothing_words", "`found` names nothing"),
        ("for each in x:\n    pass\n", "nothing_words", "`each` names nothing"),
        ("low, high = 1, 2\n", "packings", "`(low, high) = ...` packs"),
        ("call(*('a', 'b'))\n", "splats", "`*('a', 'b')` unpacks a literal"),
        ("x = 1  # They are two.\n", "pronouns", "a comment opens with `They`"),
    ],
)
def test_each_kind_of_place_is_counted_and_told(
    text: str,
    kind: str,
    advice: str,
) -> None:
    counts = plain.count("\n" + text)
    assert num_places(counts) == {kind: 1}
    place = getattr(counts, kind)[0]
    assert place.line == 2
    assert place.advice.startswith(advice)


def test_plain_code_has_none_of_them() -> None:
    text = "# A comment goes on,\n# They say, on its second line.\nlow, high = f()\n"
    assert num_places(plain.count(text)) == {}


def test_a_file_without_a_budget_starts_at_the_goals() -> None:
    headline, *places = problems("found = 1\n" * 2)
    assert headline == "core/example.py: 2 nothing-words, at most 1"
    assert len(places) == 2
    assert places[1].startswith("  core/example.py:2: `found` names nothing")
    assert not problems("found = 1\n")
    many_names = "value = 1\n" * 198
    assert not problems(many_names + "found = 1\n" * 2)
    assert problems(many_names + "found = 1\n" * 3)


def test_a_budget_allows_what_it_says_and_no_more() -> None:
    budget = {"nothing_words": 3.0, "splats": 1.0}
    text = "found = 1\n" * 3 + "f(*[1])\n"
    assert not problems(text, budget)
    assert problems(text + "each = 1\n", budget)
    assert problems(text + "f(*[1])\n", budget)


def test_full_lines_are_refused_with_the_fullest_of_them() -> None:
    headline, fullest, *_ = problems(DENSE_LINE * 10)
    assert headline == (
        "core/example.py: 22.00 tokens on a line of code, 80 tokens too many for its lines"
    )
    assert fullest.endswith(
        ": 22 tokens on a line: name a part of it, or give it more lines",
    )
    assert not problems(DENSE_LINE * 10, {"tokens": 22.0})
    assert not problems(DENSE_LINE * 2), "a tiny file"


def test_docstrings_are_no_code_and_a_formatted_text_is_one_token() -> None:
    docstring = '"""A docstring\nof two lines."""\n'
    counts = plain.count(docstring + 'name = f"{first} and {second}"\n')
    assert counts.tokens == 3
    assert counts.code_lines == 1


def test_budgets_are_lowered_and_never_raised() -> None:
    name = "core/example.py"
    budgets = {
        name: {"nothing_words": 5.0, "packings": 4.0, "splats": 1.0},
        "core/removed.py": {"splats": 1.0},
    }
    counts = plain.count("found = 1\n" * 3 + "f(*[1])\n" * 2)
    counted = {PRODUCT_FILE: counts}
    lower = plain.tightened(budgets, counted)
    assert lower == {name: {"nothing_words": 3, "splats": 1}}
    assert plain.tightened({}, counted) == {name: {}}


def test_budgets_are_read_as_they_are_written() -> None:
    budgets = {
        "core/b.py": {"splats": 2.0},
        "core/a.py": {"nothing_words": 3.0, "tokens": 8.71},
    }
    text = plain.written_budgets(budgets)
    assert text.splitlines()[1:] == [
        "core/a.py nothing_words=3 tokens=8.71",
        "core/b.py splats=2",
    ]
    assert plain.read_budgets(text) == budgets


def test_of_two_lines_for_a_file_the_lower_numbers_hold() -> None:
    first = "core/a.py nothing_words=3 splats=1 tokens=8.71\n"
    second = "core/a.py nothing_words=4 tokens=8.5\n"
    budgets = plain.read_budgets(first + second)
    assert budgets == {"core/a.py": {"nothing_words": 3.0, "tokens": 8.5}}


def test_a_file_at_its_goals_needs_no_line() -> None:
    text = plain.written_budgets({"core/a.py": {}})
    assert len(text.splitlines()) == 1


def test_counts_of_several_files_are_sums() -> None:
    total = plain.Counts()
    total.add(plain.count("found = 1\n"))
    total.add(plain.count("x = 1  # They.\nlow, high = 1, 2\n"))
    sums = [getattr(total, column.name) for column in fields(total)]
    numbers = [value for value in sums if isinstance(value, int)]
    lines, code_lines, tokens, names, comments = numbers
    assert lines == code_lines == 3
    assert tokens == 13
    assert names == 4
    assert comments == 1
    assert num_places(total) == {
        "nothing_words": 1,
        "packings": 1,
        "pronouns": 1,
    }


@pytest.mark.process
def test_the_program_prints_totals_and_the_worst_files(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("value = 1\n")
    (tmp_path / "worse.py").write_text("found = 1\n")
    process = subprocess.run(
        [sys.executable, plain.__file__, "--files", "1", str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    total, worst = process.stdout.splitlines()
    assert total.startswith(
        "2 lines, 6 tokens, 3.00 a line of code; nothing-words 50.0%"
    )
    assert worst.startswith(f"{tmp_path / 'worse.py'}: 1 lines, 3 tokens, 3.00 a line")
