"""The page of runs as Chromium draws it, with texts of models that are meant to break it.

Chromium is no dependency: `make test-tools` runs this file where there is one.
"""

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from slipstream.client.page import write_page
from slipstream.core.configuration.config_file import dump_config
from support.fakes.small_configs import small_config
from support.rigs import tools
from support.rigs.waiting import LIMIT_S

CHROMIUM = tools.program("chromium")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no chromium here: {tools.HOW}"),
]
MARKUP = "</details></script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
CONTROLS = "\x00\x07\x1b[31mred\x7f"
TURNED = "\u202egnp.exe\u2066"
ARABIC = "\u0645\u0631\u062d\u0628\u0627"
TEXTS = (MARKUP, CONTROLS, TURNED, ARABIC)
# Elements without an end.
ALONE = ("meta", "br", "img", "link", "input")


class Elements(HTMLParser):
    """All elements of a document: tag, attributes, and the text within."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in ALONE:
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self.elements[self._open.pop()][0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for number in self._open:
            self.elements[number][2].append(data)

    def texts(self, tag: str) -> list[str]:
        return ["".join(texts) for name, _, texts in self.elements if name == tag]

    def charts(self) -> dict[str, list[tuple[str, str]]]:
        """The class and the text of each line of each chart, by the chart's title."""
        charts: dict[str, list[tuple[str, str]]] = {}
        lines: list[tuple[str, str]] = []
        for tag, attributes, texts in self.elements:
            if tag in ("figcaption", "summary"):
                lines = []
            elif tag == "span":
                lines.append((str(attributes.get("class")), "".join(texts)))
            elif tag == "svg":
                charts[str(attributes["aria-label"])] = lines
        return charts


def drawn(page: Path) -> Elements:
    """What Chromium makes of a page; the page's script has no error."""
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={page.parent / 'profile'}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Elements(done.stdout)


def written_run(folder: Path) -> Path:
    """A run of two environments and an evaluation, whose replies are `TEXTS`."""

    def played(name: str, **table: object) -> dict[str, object]:
        return {
            "name": name,
            "reference": f"x:{name.split('-')[0].title().replace('/', '')}",
            **table,
        }

    config = small_config(
        run={"name": folder.name, "steps": 150},
        environments=[played("letters"), played("boxes"), played("words/long")],
        evaluations=[played("boxes-heldout", num_episodes=4)],
    )
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(config))
    rows: list[dict[str, Any]] = [
        {"evaluation_step": 0, "boxes-heldout/reward_mean": 0.5}
    ]
    rows += [
        {
            "step": step,
            "step_s": 2.7,
            "reward_mean": 0.25,
            "letters/reward": 0.125,
            "boxes/reward": step / 16,
            "words/long/reward": 0.75,
            "words/long/right": 0.5,
            "loss": -0.5,
        }
        for step in range(1, 17)
    ]
    episodes = [
        {
            "step": 16,
            "environment": "boxes",
            "task_index": number,
            "prompt": f"say {text}",
            "reply": text,
            "answer": text,
            "reward": 0.5,
            "status": "completed",
            "sampled_tokens": 3,
            "lag": 0,
        }
        for number, text in enumerate(TEXTS)
    ]
    heldout = [
        {
            "evaluation_step": step,
            "evaluation": "boxes-heldout",
            "task_index": number,
            "prompt": text,
            "reply": f"{text}{step}",
            "answer": text,
        }
        for step in (0, 16)
        for number, text in enumerate(TEXTS)
    ]
    for name, lines in (
        ("metrics", rows),
        ("trajectories", episodes),
        ("heldout", heldout),
    ):
        (folder / f"{name}.jsonl").write_text(
            "".join(f"{json.dumps(line)}\n" for line in lines)
        )
    return folder


def page_of(*folders: Path, period_s: float = 0) -> Elements:
    page = folders[0].parent / "page.html"
    write_page(folders, page, period_s=period_s)
    return drawn(page)


def test_a_browser_shows_texts_of_models_as_mere_text(tmp_path: Path) -> None:
    page = page_of(written_run(tmp_path / "run"))
    assert page.texts("title") == ["run"]
    assert (len(page.texts("script")), page.texts("img")) == (2, [])
    replies = page.texts("summary")[1:]
    assert len(replies) == len(TEXTS)
    # The newest episode is first.
    arabic, turned, controls, markup = replies
    assert arabic == f"step 16, boxes: say {ARABIC} → {ARABIC} ({ARABIC}) reward 0.5"
    assert "gnp.exe" in turned
    assert "[31mred" in controls
    assert "<script>document.title=" in markup
    whole_texts = page.texts("pre")
    assert MARKUP in whole_texts
    assert r"\u0000\u0007\u001b[31mred\u007f" in whole_texts
    assert r"\u202egnp.exe\u2066" in whole_texts
    cells = page.texts("td")
    assert f"{ARABIC}16" in cells
    shown = "".join([*replies, *whole_texts, *cells])
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown
    )


def test_a_browser_draws_one_colour_an_environment_and_no_curve_twice(
    tmp_path: Path,
) -> None:
    page = page_of(written_run(tmp_path / "run"), period_s=30.0)
    assert page.texts("div")[0].startswith(
        "running, step 16 of 150, 6 min leftwritten "
    )
    charts = page.charts()
    assert charts == {
        "Reward": [("all", "in training 0.25")],
        "Reward by environment": [
            ("c0", "letters 0.125"),
            ("c1", "boxes 1"),
            ("c2", "words/long 0.75"),
        ],
        "Held-out reward by environment": [("c1 dashed", "boxes-heldout 0.5")],
        "Right": [("c2", "words/long 0.5")],
        "Loss": [("c0", " -0.5")],
        "Seconds of a step": [("c0", "whole step 2.7")],
    }


def test_a_browser_gives_each_of_many_runs_a_colour(tmp_path: Path) -> None:
    folders = [written_run(tmp_path / f"run{number}") for number in range(8)]
    page = page_of(*folders)
    losses = page.charts()["Loss"]
    assert [look for look, _ in losses] == [f"c{number}" for number in range(8)]
    rules = "".join(page.texts("style"))
    assert all(re.search(rf"\.c{number} {{ color: ", rules) for number in range(8))
    assert page.texts("div")[0].count("not ended, step 16 of 150") == 8
