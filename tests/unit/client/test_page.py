"""The page of runs has their curves, what differs in their settings, and replies as mere text."""

import asyncio
import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slipstream.client.page import (
    MOST_POINTS,
    NEWEST,
    page_kept,
    reply_lines,
    write_page,
    write_pages,
)
from slipstream.core.configuration.config_file import dump_config
from slipstream.core.errors import ConfigError
from support.fakes.small_configs import small_config
from support.references.page_data import given_of
from support.rigs.waiting import LIMIT_S

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def a_run(folder: Path, *rows: dict[str, float], **tables: Any) -> Path:
    tables["run"] = {"name": folder.name, "steps": 30} | tables.get("run", {})
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(small_config(**tables)))
    (folder / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows)
    )
    return folder


def page_of(*folders: Path) -> dict[str, Any]:
    out = folders[0].parent / "out.html"
    write_page(folders, out, period_s=0)
    return given_of(out)


def test_curves_of_several_runs_are_on_one_page(tmp_path: Path) -> None:
    first = a_run(
        tmp_path / "first",
        {"step": 1, "reward_mean": 0.25, "wall_s": 3, "echo/right": 0.123456789},
        {"evaluation_step": 0, "reward_heldout": 0.5},
        {"step": 2, "reward_mean": 0.5},
        # A run that was resumed may have written a step again.
        {
            "step": 2,
            "reward_mean": 0.75,
            "logprob_gap_mean": 0.0,
            "logprob_gap_tokens": 0,
        },
    )
    first_run, two = page_of(
        first, a_run(tmp_path / "second", {"step": 1, "own/<b>": 3.0})
    )["runs"]
    assert (first_run["name"], two["name"]) == ("first", "second")
    assert first_run["curves"] == {
        "reward_mean": [[1, 0.25], [2, 0.75]],
        "echo/right": [[1, 0.12346]],
        "reward_heldout": [[0, 0.5]],
    }
    assert two["curves"] == {"own/<b>": [[1, 3.0]]}


def test_a_long_run_has_no_more_points_than_a_browser_opens(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": step / 7} for step in range(1, 100_001)]
    rows[500:500] = [{"evaluation_step": 500, "reward_heldout": 0.5}]
    (run,) = page_of(a_run(tmp_path / "long", *rows))["runs"]
    steps = [step for step, _ in run["curves"]["loss"]]
    assert MOST_POINTS <= len(steps) <= MOST_POINTS + NEWEST
    assert (steps[0], steps[-NEWEST:]) == (1, [*range(100_000 - NEWEST + 1, 100_001)])
    assert run["curves"]["reward_heldout"] == [[500, 0.5]]


def test_settings_that_differ_have_the_names_of_overrides_and_no_secrets(
    tmp_path: Path,
) -> None:
    def environment(name: str, weight: float, **args: str) -> dict[str, object]:
        reference = "slipstream.environments.echo:Echo"
        return {"name": name, "reference": reference, "weight": weight, "args": args}

    first = a_run(
        tmp_path / "first",
        queue={"kind": "redis", "redis_url": "redis://:hunter2@127.0.0.1:6379"},
        environments=[environment("a", 1.0), environment("b", 1.0, api_key="hunter2")],
        algorithm={"learning_rate": 1e-5},
    )
    second = a_run(
        tmp_path / "second",
        environments=[
            environment("a", 1.0),
            environment("b", 2.0, url="https://u:hunter2@x"),
        ],
        evaluations=[{"name": "held", "reference": "x:Y", "num_episodes": 4}],
        algorithm={"learning_rate": 2e-5},
    )
    data = page_of(first, second)
    assert "hunter2" not in json.dumps(data)
    texts_by_name = {name: texts for name, texts in data["settings"]}
    assert texts_by_name["environments.1.weight"] == ["1.0", "2.0"]
    assert texts_by_name["algorithm.learning_rate"] == ["1e-05", "2e-05"]
    assert texts_by_name["queue.kind"] == ["redis", "grpc"]
    # A table that only one run has is one line.
    assert texts_by_name["evaluations"] == ["–", "there"]
    assert {name.split(".")[0] for name in texts_by_name} <= {
        "environments",
        "algorithm",
        "queue",
        "evaluations",
    }
    assert page_of(first)["settings"] == []


def test_texts_of_models_are_no_markup(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", {"step": 1, HOSTILE: 1.0})
    row = {"step": 1, "prompt": HOSTILE, "reply": f"{HOSTILE}\ud800", "answer": HOSTILE}
    (folder / "trajectories.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "summary.json").write_text(
        json.dumps({"state": "failed", "steps": 1, "cause": HOSTILE})
    )
    (folder / "config.toml").write_text(f'[run]\nname = "{HOSTILE}"\n')
    (run,) = page_of(folder)["runs"]
    (shown,) = run["replies"]
    assert (shown.items() >= row.items(), run["cause"]) == (True, HOSTILE)
    text = (tmp_path / "out.html").read_text()
    assert "alert(1)</script>" not in text
    assert "<img" not in text
    # The policy of the page runs its own script alone, and loads nothing.
    script_data, script = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in text
    assert f"script-src 'sha256-{digest}'" in text
    assert "innerHTML" not in script


def test_the_newest_replies_are_shown_with_texts_of_limited_length(
    tmp_path: Path,
) -> None:
    folder = a_run(tmp_path / "run")
    rows = [{"step": step, "turns": [{"sampled": "x" * 50_000}]} for step in range(200)]
    (folder / "trajectories.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows)
    )
    (run,) = page_of(folder)["runs"]
    assert [row["step"] for row in run["replies"]][:2] == [199, 198]
    assert (tmp_path / "out.html").stat().st_size < 1 << 20


def test_an_environment_and_its_evaluations_share_a_colour(tmp_path: Path) -> None:
    def environment(name: str, class_name: str, **table: object) -> dict[str, object]:
        return {"name": name, "reference": f"x:{class_name}", **table}

    folder = a_run(
        tmp_path / "run",
        run={"steps": 150},
        environments=[
            environment("letters", "Letters"),
            environment("boxes", "Boxes", args={"size": 2}),
            environment("boxes-hard", "Boxes", args={"size": 9}),
            environment("letters-hel", "Letters"),
        ],
        evaluations=[
            environment("boxes-heldout", "Boxes", num_episodes=4),
            environment("sums", "Sums", num_episodes=4),
            environment(
                "boxes-hard-heldout",
                "Boxes",
                num_episodes=4,
                args={"size": 9, "split": 1},
            ),
            environment("letters-heldout", "Letters", num_episodes=4),
        ],
    )
    (run,) = page_of(folder)["runs"]
    assert run["steps"] == 150
    assert run["environments"] == {
        "letters": {"colour": 0, "heldout": False},
        "boxes": {"colour": 1, "heldout": False},
        "boxes-hard": {"colour": 2, "heldout": False},
        "letters-hel": {"colour": 3, "heldout": False},
        "boxes-heldout": {"colour": 1, "heldout": True},
        "sums": {"colour": 5, "heldout": True},
        "boxes-hard-heldout": {"colour": 2, "heldout": True},
        "letters-heldout": {"colour": 3, "heldout": True},
    }


def test_a_folded_reply_has_its_prompt_s_end_and_its_own_beginning(
    tmp_path: Path,
) -> None:
    folder = a_run(tmp_path / "run")
    row = {
        "step": 3,
        "prompt": f"first {'p' * 80} last",
        "reply": "r\n" * 80,
        "answer": None,
    }
    (folder / "trajectories.jsonl").write_text(json.dumps(row) + "\n")
    (run,) = page_of(folder)["runs"]
    short = run["replies"][0]["short"]
    assert short["prompt"].startswith("…p")
    assert short["prompt"].endswith(" last")
    assert short["reply"].startswith("r r r")
    assert short["answer"] == ""
    assert max(len(text) for text in short.values()) == 60


def test_the_newest_replies_have_lines(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "reply": "a\nb", "reward": n / 2} for n in range(5)]
    (tmp_path / "trajectories.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows)
    )
    assert reply_lines(tmp_path, tmp_path, 2) == [
        "p4: 'a b', reward 2.0",
        "p3: 'a b', reward 1.5",
    ]
    assert reply_lines(tmp_path / "none", tmp_path, 2) == []


def test_pipes_in_a_stranger_s_folder_are_passed_over(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    for name in ("config.toml", "metrics.jsonl", "trajectories.jsonl", "summary.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    (run,) = page_of(folder)["runs"]
    assert (run["name"], run["curves"], run["replies"]) == ("run", {}, [])


async def test_a_run_writes_its_page_while_it_goes_on_and_at_its_end(
    tmp_path: Path,
) -> None:
    folder = a_run(tmp_path / "run", {"step": 1, "loss": 1.0})
    messages: list[str] = []
    async with page_kept(folder, messages.append):
        while not (folder / "page.html").exists():
            await asyncio.sleep(0.01)
        assert given_of(folder / "page.html")["period_s"] == 30
        (folder / "summary.json").write_text('{"state": "finished", "steps": 1}')
    data = given_of(folder / "page.html")
    assert (data["period_s"], data["runs"][0]["state"]) == (0, "finished")
    assert (messages, list(folder.glob("*.partial"))) == ([], [])


async def test_a_page_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    messages: list[str] = []
    folder = tmp_path / "gone"
    async with page_kept(folder, messages.append):
        pass
    async with page_kept(folder, messages.append):
        pass
    assert (
        messages
        == [f"{folder}/page.html cannot be written: No such file or directory"] * 2
    )


@pytest.mark.process
def test_a_page_is_in_utf8_whatever_the_locale(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "first")
    (folder / "config.toml").unlink()
    folder = folder.rename(tmp_path / "é ŵ")
    program = (
        "import sys; from pathlib import Path; from slipstream.client.page import write_page\n"
        "write_page([Path(sys.argv[1])], Path(sys.argv[2]), period_s=0)"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    out = tmp_path / "out.html"
    subprocess.run(
        [sys.executable, "-c", program, folder, out],
        env=os.environ | ascii_only,
        check=True,
        timeout=LIMIT_S,
    )
    assert (
        given_of(out)["runs"][0]["name"].encode(errors="surrogateescape")
        == "é ŵ".encode()
    )


def test_a_page_overwrites_nothing_but_a_run_s_own_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = a_run(tmp_path / "first")
    second = a_run(tmp_path / "second")
    for _ in range(2):
        assert write_pages([first], None) == 0
    assert write_pages([first, second], None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *[f"{first}/page.html"] * 2,
        "page.html",
    ]
    for folders, out in (([first, second], None), ([first], Path("page.html"))):
        with pytest.raises(
            ConfigError, match=r"page\.html exists already: remove it, or name"
        ):
            write_pages(folders, out)
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        write_pages([Path("nowhere")], None)
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write_pages([first], Path("nowhere/page.html"))
