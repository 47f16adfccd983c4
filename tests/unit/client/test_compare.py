"""Two runs are compared by their settings and metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import JsonValue
from slipstream.client.compare import as_page, compare, means, read_run
from slipstream.core.configuration.config_file import dump_config
from slipstream.core.errors import ConfigError
from support.fakes.small_configs import small_config


def a_run(folder: Path, rows: list[dict[str, float]], **tables: dict[str, JsonValue]) -> Path:
    tables["run"] = {"name": folder.name, "steps": 30} | tables.get("run", {})
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(small_config(**tables)))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def rows(number: int, reward: float) -> list[dict[str, float]]:
    return [{"step": step, "reward_mean": reward * step} for step in range(1, number + 1)]


@pytest.fixture
def first(tmp_path: Path) -> Path:
    queue: dict[str, JsonValue] = {"kind": "redis", "redis_url": "redis://:hunter2@127.0.0.1:6379"}
    more = [{"evaluation_step": 5, "reward_heldout": 0.5}, {"step": 12, "own/<report>": 3.0}]
    return a_run(tmp_path / "first", [*rows(12, 1.0), *more], queue=queue)


@pytest.fixture
def second(tmp_path: Path) -> Path:
    algorithm: dict[str, JsonValue] = {"loss": "gspo", "learning_rate": 2e-5}
    return a_run(tmp_path / "second", rows(20, 2.0), algorithm=algorithm)


def test_settings_that_differ_and_means_are_printed(first, second, capsys):
    assert compare([first, second], None) == 0
    text = capsys.readouterr().out
    lines = {line.rsplit(maxsplit=2)[0]: line.split()[-2:] for line in text.splitlines() if line}
    assert lines["algorithm.loss"] == ["ppo", "gspo"]
    assert lines["algorithm.learning_rate"][1] == "2e-05"
    assert lines["reward_mean, to step 12"] == ["7.5", "15"]
    assert lines["reward_heldout, to step 5"] == ["0.5", "–"]
    assert not {"run.name", "run.dir", "run.steps"} & lines.keys()
    assert "hunter2" not in text


def test_a_step_that_was_trained_again_counts_once(tmp_path: Path, second: Path) -> None:
    again = a_run(tmp_path / "again", [*rows(12, 1.0), *rows(12, 2.0)[10:]])
    assert read_run(again).curves["reward_mean"][-2:] == [(11, 22), (12, 24)]
    assert next(means(read_run(again), read_run(second)))[1:] == ("9.8", "15")


def test_the_page_holds_all_curves_and_asks_for_nothing(first: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    compare([first, a_run(tmp_path / "third", rows(3, 1.0))], out)
    page = out.read_text()
    (data,) = re.findall(r'id="given">(.*)</script>', page)
    assert "<" not in data
    curves = dict(json.loads(data)["curves"])
    assert curves["own/<report>"] == [[[12, 3.0]], []]
    assert curves["reward_mean"][1] == [[1, 1.0], [2, 2.0], [3, 3.0]]
    assert "hunter2" not in page
    assert not re.search(r"\b(src|href)=|fetch\(|import ", page)


def test_no_text_of_a_run_is_markup(first: Path) -> None:
    run = read_run(first)
    tables = {"settings": [("algorithm.loss", "<i>1</i>", "2")], "means": []}
    page = as_page(["<b>one</b>", "</script>"], tables, [run, run])
    assert "<b>" not in page and "<i>" not in page
    assert page.count("</script>") == 2


def test_what_cannot_be_compared_is_refused(first: Path, second: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"page exists already: remove it"):
        (tmp_path / "page").write_text("")
        compare([first, second], tmp_path / "page")
    (second / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="second has no metrics yet"):
        compare([first, second], None)
    with pytest.raises(ConfigError, match="no such folder"):
        compare([first, tmp_path / "absent"], None)
