"""The page of figures is made from the results."""

from __future__ import annotations

import json
from pathlib import Path

import report


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


def test_every_block_of_the_page_has_an_end() -> None:
    page = report.PAGE.read_text()
    assert page.count("<!-- results ") == page.count("<!-- end -->") > 0
