"""Every file and command of docs/guides/agents.md, and each of its environments."""

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
from support.rigs.run_processes import check_ledger, summary_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("nothing_survives")]

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "agents.md"


@pytest.mark.slow
def test_every_command_of_the_page_works(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_model)
    reader = Reader(PAGE, tmp_path, 6, meanwhile=("python serve_agents.py",))
    reader.go()
    (checked,) = (text for command, text in reader.outputs.items() if "slipstream check" in command)
    assert "100 tasks, the first call is POST /v1/chat/completions, in " in checked
    summary = summary_of(tmp_path / "runs" / "agents")
    assert summary["steps"] == 6
    assert summary["ledger"]["failed"] == 0
    check_ledger(summary)
    # A client that serves ends well only when the run that it served ends.
    assert reader.outputs["python serve_agents.py"] == ""


@pytest.mark.long
async def test_the_program_of_the_page_solves_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    # A reader has activated the environment.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    blocks = [block[2] for block in BLOCK.finditer(PAGE.read_text()) if block[1] == "toml"]
    (text,) = (text for text in blocks if text.startswith("[[environments]]"))
    (entry,) = tomllib.loads(text)["environments"]
    environment = load_environment(entry["reference"], json.dumps(entry["args"]), "")

    def add(question: str) -> str:
        return str(sum(int(number) for number in re.findall(r"\d+", question)))

    host = EpisodeHost(environment)
    for reply, reward in ((add, 1.0), (lambda _: "5", 0.0)):
        for index in range(2):
            episode = Episode(host, answers(reply), key=f"{index}.{reward}", task_index=index)
            answer = await episode.run()
            assert answer.agent_result.reward == reward, answer
    await host.close_all()
