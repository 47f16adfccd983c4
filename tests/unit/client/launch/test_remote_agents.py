"""Agents from elsewhere in the check before a run: they call by the port of the host."""

import sys
from pathlib import Path

import pytest
from slipstream.client.launch.preflight import check_environments
from slipstream.client.launch.scene import Scene
from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import free_port
from slipstream.core.settings.config import Config
from support.fakes.small_configs import small_config

PROGRAM = """
import os, sys, urllib.request
url = os.environ["OPENAI_BASE_URL"]
with open(sys.argv[1], "a") as file:
    file.write(url + "\\n")
key = os.environ["OPENAI_API_KEY"]
asked = urllib.request.Request(
    url + "/chat/completions", b"{}", {"authorization": f"Bearer {key}"}
)
urllib.request.urlopen(asked)
"""

pytestmark = pytest.mark.process


def settings(folder: Path, **tables: object) -> Config:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    section = {
        "name": "e",
        "reference": "slipstream.environments.command:Command",
        "timeout_s": 60.0,
        "args": {
            "command": [sys.executable, str(program), str(folder / "urls"), "{task}"],
            "tasks": ["hi"],
            "score_file": "score",
            "remote": True,
        },
    }
    run = {"dir": str(folder / "runs"), "name": "r"}
    return small_config(run=run, environments=[section], **tables)


async def test_an_agent_from_elsewhere_is_begun_by_the_address_of_the_settings(
    tmp_path: Path,
) -> None:
    (tmp_path / "runs").mkdir()
    listen = f"127.0.0.1:{free_port('127.0.0.1')}"
    await check_environments(Scene(settings(tmp_path, agents={"listen": listen})))
    urls = (tmp_path / "urls").read_text().splitlines()
    assert urls
    for url in urls:
        assert url.startswith(f"http://{listen}/")


async def test_an_agent_from_elsewhere_without_an_address_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="set agents.listen"):
        await check_environments(Scene(settings(tmp_path)))
