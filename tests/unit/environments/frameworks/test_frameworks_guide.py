"""Every environment on the page of frameworks can be loaded and begins its first task."""

import copy
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from slipstream.client.environment import Environment, TaskSource
from slipstream.client.environment_loader import load_environment

GUIDES = Path(__file__).parents[4] / "docs" / "guides"
PAGE = GUIDES / "frameworks.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OURS = "slipstream.environments.frameworks."
# Class -> a module of its package that nothing else brings.
PACKAGES = {
    f"{OURS}reasoning_gym:ReasoningGym": "cellpylib",
    f"{OURS}gymnasium:Gymnasium": "gymnasium",
}


def blocks(language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(PAGE.read_text()) if kind == language]


def entries() -> list[dict]:
    tables = [tomllib.loads(text) for text in blocks("toml")]
    shown = [
        e for table in tables for part in table.values() if isinstance(part, list) for e in part
    ]
    return [entry for entry in shown if entry["reference"] in PACKAGES]


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's functions lie in the working directory."""
    shown = (text for text in blocks("python") if "def observe(" in text)
    (tmp_path / "my_functions.py").write_text("".join(shown))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_functions", raising=False)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry["name"])
def test_every_environment_that_is_shown_begins(entry: dict) -> None:
    package = PACKAGES[entry["reference"]]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is missing")
    environment = load_environment(entry["reference"], json.dumps(entry["args"]), "")
    task = TaskSource(environment)[0]
    episode: Environment = copy.copy(environment)
    assert all(message.content for message in episode.reset(task))
    episode.close()


def test_all_classes_are_shown() -> None:
    assert {entry["reference"] for entry in entries()} == set(PACKAGES)


def test_the_functions_that_are_shown_play() -> None:
    pytest.importorskip("gymnasium")
    (args,) = [entry["args"] for entry in entries() if entry["name"] == "cart-pole"]
    environment = load_environment(f"{OURS}gymnasium:Gymnasium", json.dumps(args), "")
    (message,) = environment.reset(0)
    assert re.search(r"The cart is at -?0\.0\d, the pole leans (left|right)\.$", message.content)
    assert environment.step("Left, then").messages[0].content == "Say left or right first."
    assert environment.step("left then").reward == 1.0
    environment.close()
