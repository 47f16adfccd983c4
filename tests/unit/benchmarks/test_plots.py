"""The plots of the page on performance are those of the results."""

from pathlib import Path

import pytest

from benchmarks.common import plots


def test_plots_are_drawn_from_the_results(tmp_path: Path) -> None:
    plots.draw(tmp_path)
    for name in plots.PLOTS:
        made = tmp_path / f"plot-{name}.svg"
        assert made.stat().st_size < 40_000
        assert made.read_text() == (plots.IMAGES / made.name).read_text(), "run make plots"


@pytest.mark.parametrize("name", plots.PLOTS)
def test_the_page_shows_every_plot(name: str) -> None:
    page = plots.IMAGES.parent / "performance.md"
    assert f"(images/plot-{name}.svg)" in page.read_text()
