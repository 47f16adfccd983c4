"""The pages of figures and their plots are made from the results."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.common import plots, report

PAGES = sorted(report.RESULTS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_its_results_as_they_are(page: Path) -> None:
    text = page.read_text()
    assert text.count("<!-- results ") == text.count("<!-- end -->")
    assert report.fill(text, report.RESULTS) == text, (
        "run python -m benchmarks.common.report"
    )


def test_a_result_that_is_not_there_is_not_measured_yet(tmp_path: Path) -> None:
    page = "<!-- results y -->\nold\n<!-- end -->\n"
    filled = "<!-- results y -->\nNot measured yet.\n<!-- end -->\n"
    assert report.fill(page, tmp_path) == report.fill(filled, tmp_path) == filled


def test_every_result_with_a_table_is_shown() -> None:
    shown = set(
        re.findall(
            r"<!-- results (\S+) -->", "".join(page.read_text() for page in PAGES)
        )
    )
    results = {
        path.stem: json.loads(path.read_text())
        for path in report.RESULTS.glob("*.json")
    }
    assert {name for name, result in results.items() if result.get("table")} == shown


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
    assert (
        figures - set(FIGURE.findall((root / "docs" / "performance.md").read_text()))
        == set()
    )


def test_figures_of_the_short_page_are_those_of_the_results() -> None:
    page = report.RESULTS.parents[1] / "docs" / "performance.md"
    rows = [(match[0], match[1]) for match in ROW.finditer(page.read_text())]
    assert len(rows) > 25
    wrong = []
    for row, link in rows:
        figures = FIGURE.findall(" ".join(row.split("|")[2:-3]))
        matches = set(FIGURE.findall((page.parent / link).read_text()))
        wrong += [f"{figure} in: {row}" for figure in figures if figure not in matches]
    assert wrong == []


def test_plots_are_drawn_from_the_results(tmp_path: Path) -> None:
    plots.draw(tmp_path)
    for name in plots.PLOTS:
        plot = tmp_path / f"plot-{name}.svg"
        assert plot.stat().st_size < 40_000
        assert plot.read_text() == (plots.IMAGES / plot.name).read_text(), (
            "run make plots"
        )


@pytest.mark.parametrize("name", plots.PLOTS)
def test_the_page_shows_every_plot(name: str) -> None:
    page = plots.IMAGES.parent / "performance.md"
    assert f"(images/plot-{name}.svg)" in page.read_text()
