"""Names on a hub of our own, which the official client asks."""

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomli_w
from slipstream.core.configuration.hub_downloads import QUESTIONS
from support.fakes.hub import COMMIT, Hub, serve_hub
from support.rigs.forked_programs import Forks
from support.rigs.waiting import LIMIT_S

pytest.importorskip("huggingface_hub")

# The client reads its variables when it is imported, so each use is a process of its own. Whatever
# else they import is imported once.
pytestmark = pytest.mark.process
ASKS = Forks("slipstream.core.configuration.config_file", entry="")

PROGRAM = """
import json, sys
from slipstream.core.configuration.config_file import dump_config, load_config
from slipstream.core.errors import ConfigError
try:
    config = load_config(None, json.loads(sys.argv[1]), **json.loads(sys.argv[2]))
except ConfigError as error:
    sys.exit(f"refused: {error}")
print(dump_config(config))
"""
NEWER = "beef" * 10
FILES = ("config.json", "model.safetensors", "tokenizer.json")
OTHERS = (
    "consolidated.safetensors",
    "original/weights.safetensors",
    "pytorch_model.bin",
)

Ask = Callable[..., dict]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "hub" / "some" / "tiny"
    for name in FILES + OTHERS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    sums = tmp_path / "hub" / "some" / "sums"
    sums.mkdir()
    (sums / "README.md").write_text("# Sums\n")
    with serve_hub(tmp_path / "hub") as served:
        yield served


@pytest.fixture
def ask(hub: Hub, tmp_path: Path) -> Ask:
    """Returns the settings of a configuration, or {"refused": the line that refuses it}."""

    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def ask(
        *overrides: str, offline: bool = False, endpoint: str = "", **settings: object
    ) -> dict:
        variables = os.environ | {
            "HF_ENDPOINT": endpoint or hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": str(int(offline)),
        }
        variables.pop("HF_TOKEN", None)
        environment = 'environments=[{reference="some:Thing"}]'
        words = [environment, "run.steps=1", "run.name=first", *overrides]
        arguments = (
            str(program),
            json.dumps(words),
            json.dumps({"hub": "whole"} | settings),
        )
        done = ASKS.run(arguments, limit_s=LIMIT_S, cwd=tmp_path, environ=variables)
        if done.returncode:
            *messages, line = done.stderr.splitlines()
            assert messages == [], done.stderr
            return {"refused": line.removeprefix("refused: ")}
        return tomllib.loads(done.stdout)

    return ask


def model_of(settings: dict) -> Path:
    assert "refused" not in settings, settings
    return Path(settings["model"]["path"])


def files_of(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    }


def keep(settings: dict, folder: Path) -> None:
    """Writes the settings into the run's folder, as a run does."""
    path = folder / "runs" / "first" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(tomli_w.dumps(settings))


def test_a_model_by_its_name_is_the_folder_of_a_commit_with_what_a_run_reads(
    ask: Ask,
) -> None:
    folder = model_of(ask("model.path=some/tiny"))
    assert folder.name == COMMIT
    assert files_of(folder) == set(FILES)
    assert model_of(ask(f"model.path=some/tiny@{COMMIT}")) == folder
    critic = ask(
        "model.path=some/tiny",
        "critic={path='some/tiny', learning_rate=1e-3}",
        "algorithm.advantage=gae",
    )
    assert critic["critic"]["path"] == str(folder)


def test_a_dry_run_brings_no_weights(ask: Ask) -> None:
    folder = model_of(ask("model.path=some/tiny", hub="small"))
    assert files_of(folder) == set(FILES) - {"model.safetensors"}


def test_a_run_that_goes_on_takes_the_state_that_it_began_with(ask, hub, tmp_path):
    requests = (
        "model.path=some/tiny",
        f'environments=[{{reference="{QUESTIONS}", args={{path="hf:some/sums"}}}}]',
    )
    first = ask(*requests)
    assert first["environments"][0]["args"]["hub_revision"] == COMMIT
    keep(first, tmp_path)
    hub.commit = NEWER
    again = ask(*requests)
    assert model_of(again).name == COMMIT
    assert again["environments"] == first["environments"]
    # The cache may be gone.
    shutil.rmtree(tmp_path / "home")
    assert files_of(model_of(ask(*requests))) == set(FILES)
    # A different run takes the newest state, and so does one that never goes on.
    assert model_of(ask(*requests, "run.name=second")).name == NEWER
    assert model_of(ask(*requests, "run.resume=never")).name == NEWER


def test_parts_that_start_apart_need_a_commit(ask: Ask) -> None:
    refusal = ask("model.path=some/tiny", apart=True)["refused"]
    assert refusal.startswith(
        "model.path must name a commit, some/tiny@COMMIT, or a folder where"
    )
    assert model_of(ask(f"model.path=some/tiny@{COMMIT}", apart=True)).name == COMMIT


def test_what_was_brought_once_is_read_again_without_a_network(
    ask: Ask, hub: Hub
) -> None:
    folder = model_of(ask("model.path=some/tiny"))
    num_requests = len(hub.requests)
    assert model_of(ask("model.path=some/tiny", offline=True)) == folder
    assert len(hub.requests) == num_requests
    refusal = ask("model.path=some/other", offline=True)["refused"]
    assert re.fullmatch(
        r"model\.path: some/other, no folder in \S+, is not in \S+, and HF_HUB_OFFLINE keeps it "
        "from being asked for",
        refusal,
    )


def test_a_model_that_is_not_to_be_had_is_one_line(
    ask: Ask, hub: Hub, tmp_path: Path
) -> None:
    begins = f"model.path: some/tiny, no folder in {tmp_path}, "
    hub.gated.add("some/tiny")
    refusal = ask("model.path=some/tiny")["refused"]
    assert refusal.startswith(
        f"{begins}is gated: accept its terms at {hub.url}/some/tiny, then let"
    )
    hub.gated.clear()
    hub.private.add("some/tiny")
    refusal = ask("model.path=some/tiny")["refused"]
    assert refusal.startswith(f"{begins}is not at {hub.url}/some/tiny, or is private: ")
    hub.private.clear()
    refusal = ask("model.path=some/tiny@v9")["refused"]
    assert refusal == f"{begins}has no revision 'v9'"
    refusal = ask("model.path=some/none")["refused"]
    assert f"is not at {hub.url}/some/none, or is private" in refusal
    refusal = ask("model.path=some/tiny", endpoint="http://127.0.0.1:9")["refused"]
    assert "and http://127.0.0.1:9 gives no answer: " in refusal
    refusal = ask(
        f'environments=[{{reference="{QUESTIONS}", args={{path="hf:some/none"}}}}]',
        "model.path=some/tiny",
    )["refused"]
    assert refusal.startswith(
        f"hf:some/none is not at {hub.url}/datasets/some/none, or is private"
    )


@pytest.mark.parametrize(
    "path", ["models/tiny", "here/tiny", "/srv/none", "../none", "tiny"]
)
def test_paths_of_folders_are_never_asked_for(ask, hub, tmp_path, path):
    (tmp_path / "here").mkdir()
    assert model_of(ask(f"model.path={path}")) == Path(path)
    assert hub.requests == []
