"""The page of figures is made from the results."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.common import report

PAGES = sorted(report.RESULTS.glob("*.md"))


def test_a_block_shows_command_machine_and_table_of_its_result(tmp_path: Path) -> None:
    result = {
        "command": "python benchmarks/x.py --shape 8B --repeats 5",
        "date": "2026-11-20 12:00",
        "machine": {"processor": "EPYC", "cores": 16, "gpus": ["NVIDIA H200, 143771 MiB, 580.1"]},
        "versions": {"torch": "2.11.0"},
        "table": ["| a |", "|---|", "| 1 |", "", "best 0.9"],
    }
    (tmp_path / "x.json").write_text(json.dumps(result))
    page = (
        "before\n<!-- results x -->\nold\n<!-- end -->\n<!-- results y -->\n<!-- end -->\nafter\n"
    )
    filled = report.fill(page, tmp_path)
    assert filled == (
        "before\n<!-- results x -->\n\n"
        "2026-11-20 12:00; 1 x H200, 16 cores of EPYC; torch 2.11.0.\n\n"
        "```\npython benchmarks/x.py --shape 8B --repeats 5\n```\n\n"
        "| a |\n|---|\n| 1 |\n\nbest 0.9\n"
        "<!-- end -->\n<!-- results y -->\nNot measured yet.\n<!-- end -->\nafter\n"
    )
    assert report.fill(filled, tmp_path) == filled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_its_results_as_they_are(page: Path) -> None:
    text = page.read_text()
    assert text.count("<!-- results ") == text.count("<!-- end -->")
    assert report.fill(text, report.RESULTS) == text, "run python -m benchmarks.common.report"


def test_every_result_with_a_table_is_shown() -> None:
    shown = set(re.findall(r"<!-- results (\S+) -->", "".join(page.read_text() for page in PAGES)))
    made = {path.stem: json.loads(path.read_text()) for path in report.RESULTS.glob("*.json")}
    assert {name for name, result in made.items() if result.get("table")} == shown


ROW = re.compile(r"^\|.*\]\((\S+/results/[\w-]+\.md)[#\w-]*\) \|$", re.MULTILINE)
FIGURE = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def test_figures_of_the_readme_are_those_of_the_short_page() -> None:
    root = report.RESULTS.parents[1]
    readme = (root / "README.md").read_text()
    section = readme.split("## How fast\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\|[^|]*\| ([^|-]*) \|$", section, re.MULTILINE)
    # The table of the first screen.
    cells += re.findall(r"^\| .*", readme.split("\n## ")[0], re.MULTILINE)
    figures = {figure for cell in cells for figure in FIGURE.findall(cell)}
    assert len(figures) > 6
    assert figures - set(FIGURE.findall((root / "docs" / "performance.md").read_text())) == set()


def test_figures_of_the_short_page_are_those_of_the_results() -> None:
    page = report.RESULTS.parents[1] / "docs" / "performance.md"
    rows = [(match[0], match[1]) for match in ROW.finditer(page.read_text())]
    assert len(rows) > 25
    wrong = []
    for row, link in rows:
        figures = FIGURE.findall(" ".join(row.split("|")[2:-3]))
        known = set(FIGURE.findall((page.parent / link).read_text()))
        wrong += [f"{figure} in: {row}" for figure in figures if figure not in known]
    assert wrong == []
