"""Every file and command of pages of docs/guides, and each of their environments."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from slipstream.client.environment_loader import load_environment
from slipstream.client.episode_host import EpisodeHost
from support.fakes.page_reader import BLOCK, Reader
from support.fakes.scripted_server import Episode, answers
from support.rigs.completed import completed
from support.rigs.run_processes import LONG_RUN, PROGRAM, ROOT, checked

pytestmark = [*LONG_RUN, pytest.mark.timeout(600)]
AGENTS, DEMONSTRATIONS = (
    ROOT / f"docs/guides/{n}.md" for n in ("agents", "demonstrations")
)
GOES_ON = "slipstream run deploy/configs/quickstart.toml"


def blocks_of(page: Path, kind: str) -> list[str]:
    """The blocks of a language."""
    return [block[2] for block in BLOCK.finditer(page.read_text()) if block[1] == kind]


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """Where a reader is who has made the tiny model."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_model)
    return tmp_path


@pytest.mark.slow
def test_every_command_about_agents_works(folder: Path) -> None:
    # On a busy machine six steps end before the second terminal has begun.
    steps = 20
    reader = Reader(AGENTS, folder, steps, meanwhile=("python serve_agents.py",))
    reader.go()
    (message,) = (
        text
        for command, text in reader.outputs.items()
        if "slipstream check" in command
    )
    assert "100 tasks, the first call is POST /v1/chat/completions, in " in message
    summary = checked(folder / "runs" / "agents")
    assert summary["steps"] == steps
    assert summary["ledger"]["failed"] == 0
    # A client that serves ends well only when the run that it served ends.
    assert reader.outputs["python serve_agents.py"] == ""


async def test_the_program_about_agents_solves_its_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A reader has activated the environment.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    blocks = blocks_of(AGENTS, "toml")
    text = next(block for block in blocks if block.startswith("[[environments]]"))
    (entry,) = tomllib.loads(text)["environments"]
    environment = load_environment(entry["reference"], json.dumps(entry["args"]), "")

    def add(question: str) -> str:
        return str(sum(int(number) for number in re.findall(r"\d+", question)))

    host = EpisodeHost(environment)
    for reply, reward in ((add, 1.0), (lambda _: "5", 0.0)):
        for index in range(2):
            episode = Episode(
                host, answers(reply), key=f"{index}.{reward}", task_index=index
            )
            answer = await episode.run()
            assert answer.agent_result.reward == reward, answer
    await host.close_all()


@pytest.mark.slow
def test_every_command_about_demonstrations_works(folder: Path) -> None:
    pytest.importorskip("vllm")
    lines = DEMONSTRATIONS.read_text().splitlines(keepends=True)
    (second,) = (line for line in lines if line.startswith(GOES_ON))
    page = folder / "page.md"
    page.write_text("".join(line for line in lines if line is not second))
    Reader(page, folder, 6).go()
    summary = checked(folder / "runs" / "supervised")
    assert (summary["steps"], summary["reward_last"]) == (6, 1.0)
    # The next run would begin with the model that this one has made.
    (folder / "deploy").symlink_to(ROOT / "deploy")
    done = completed([PROGRAM, *second.split()[1:], "--dry-run"], cwd=folder)
    assert done.returncode == 0, done.stderr


def test_the_environment_about_demonstrations_gives_its_replies(tmp_path: Path) -> None:
    (code,) = blocks_of(DEMONSTRATIONS, "python")
    (tmp_path / "echoes.py").write_text(code)
    environment = load_environment("echoes:Echoes", "{}", str(tmp_path))
    assert environment.reset("b").reply == "b b"
    assert environment.step("b b").reward == 1.0
