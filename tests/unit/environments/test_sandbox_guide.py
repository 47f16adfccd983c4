"""What docs/guides/sandbox.md and docs/guides/judges.md show, as a reader uses it."""

import json
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
from slipstream.client.environment_loader import load_environment

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux"),
]

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    return [
        text
        for name, text in BLOCK.findall((GUIDES / page).read_text())
        if name == language
    ]


async def test_the_functions_of_the_page_are_examined(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (lines,) = blocks("sandbox.md", "json")
    Path("functions.jsonl").write_text(lines)
    (text,) = blocks("sandbox.md", "toml")
    (entry,) = tomllib.loads(text)["environments"]
    environment = load_environment(entry["reference"], json.dumps(entry["args"]), "")
    replies = (
        "```\ndef add(a, b):\n    return a + b\n```",
        "```\ndef last(x):\n    return 3\n```",
    )
    rewards = []
    for task, reply in zip(environment.tasks(), replies, strict=True):
        assert environment.reset(task)[0].content.endswith(
            " Reply with one block of code."
        )
        rewards.append((await environment.step(reply)).reward)
    assert rewards == [1, 0.5]


async def test_the_environment_of_the_page_runs_programs(tmp_path: Path) -> None:
    (text,) = blocks("sandbox.md", "python")
    (tmp_path / "shown.py").write_text(text)
    environment = runpy.run_path(str(tmp_path / "shown.py"))["Prints"]()
    environment.reset(environment.tasks()[42])
    assert (await environment.step("print(6 * 7)")).reward == 1
    wrong = await environment.step("import time\ntime.sleep(60)")
    assert (wrong.reward, wrong.metrics) == (0, {"ended_by_limit": True})


def test_the_judged_environments_of_the_page_can_be_loaded(tmp_path, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    Path("topics.jsonl").write_text('{"topic": "the sea"}\n')
    Path("questions.jsonl").write_text('{"question": "Why is the sea salty?"}\n')
    elsewhere, rewarded = (tomllib.loads(text) for text in blocks("judges.md", "toml"))
    (entry,) = elsewhere["environments"]
    environment = load_environment(entry["reference"], json.dumps(entry["args"]), "")
    (message,) = environment.reset(environment.tasks()[0])
    assert message.content == "Write four lines about the sea."
    (entry,) = rewarded["environments"]
    environment = load_environment(entry["reference"], json.dumps(entry["args"]), "")
    (message,) = environment.reset(environment.tasks()[0])
    assert message.content == "Why is the sea salty?"
