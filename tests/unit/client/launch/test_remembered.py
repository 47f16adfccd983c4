"""Checks of environments that a command made again does not repeat."""

import sys
from pathlib import Path

import pytest
from slipstream.client.launch.preflight import check_environments
from slipstream.client.launch.remembered import REMEMBERED_S, Passed, Remembered, key_of
from slipstream.client.launch.scene import SERVER, Scene
from slipstream.client.read_files import state_of
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from support.fakes.small_configs import small_config

# Every load leaves a mark.
COUNTED = """
from pathlib import Path
import counted_helper
from slipstream.environments.echo import Echo

class Counted(Echo):
    def __init__(self):
        super().__init__()
        Path("data.txt").read_text()
        with open("loads", "a") as file:
            file.write("x")
"""
PROGRAM = """
import json, os, urllib.request
folder = os.path.dirname(os.path.dirname(__file__))
with open(os.path.join(folder, "loads"), "a") as file:
    file.write("x")
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
key = os.environ["OPENAI_API_KEY"]
asked = urllib.request.Request(url, body, {"authorization": f"Bearer {key}"})
urllib.request.urlopen(asked)
"""

pytestmark = pytest.mark.process


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runs").mkdir()
    (tmp_path / "counted.py").write_text(COUNTED)
    (tmp_path / "counted_helper.py").write_text("")
    (tmp_path / "data.txt").write_text("one")
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "program.py").write_text(PROGRAM)
    (tmp_path / "agent" / "helper.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def counted(folder: Path, **changes: object) -> Config:
    section = {
        "name": "e",
        "reference": "counted:Counted",
        "timeout_s": 60.0,
        **changes,
    }
    return small_config(
        run={"dir": str(folder / "runs"), "name": "r"}, environments=[section]
    )


def num_loads(folder: Path) -> int:
    return len((folder / "loads").read_text())


async def test_a_check_that_has_passed_is_not_repeated_and_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await check_environments(Scene(counted(folder)))
    first = capsys.readouterr()
    assert "not repeated" not in first.out
    loads = num_loads(folder)
    await check_environments(Scene(counted(folder)))
    second = capsys.readouterr()
    assert num_loads(folder) == loads
    assert (
        "1 environment passed a check in the last 10 minutes, which is not repeated"
        in (second.out)
    )
    assert second.err == first.err


@pytest.mark.parametrize("changed", ["counted.py", "counted_helper.py", "data.txt"])
async def test_a_check_is_repeated_when_a_file_that_it_read_has_changed(
    folder: Path, changed: str
) -> None:
    await check_environments(Scene(counted(folder)))
    loads = num_loads(folder)
    path = folder / changed
    path.write_text(path.read_text() + "\n")
    await check_environments(Scene(counted(folder)))
    assert num_loads(folder) > loads


async def test_an_environment_that_is_broken_meanwhile_is_refused(folder: Path) -> None:
    await check_environments(Scene(counted(folder)))
    (folder / "counted_helper.py").write_text("raise ValueError('broken')\n")
    with pytest.raises(ConfigError, match="broken"):
        await check_environments(Scene(counted(folder)))
    with pytest.raises(ConfigError, match="broken"):
        await check_environments(Scene(counted(folder)))


async def test_a_check_of_other_settings_variables_or_parts_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_environments(Scene(counted(folder)))
    for scene, variable in (
        (Scene(counted(folder, timeout_s=61.0)), "one"),
        (Scene(counted(folder), SERVER), "one"),
        (Scene(counted(folder)), "two"),
    ):
        loads = num_loads(folder)
        monkeypatch.setenv("HOME", variable)
        await check_environments(scene)
        assert num_loads(folder) > loads


async def test_a_program_is_started_again_when_a_file_beside_it_has_changed(
    folder: Path,
) -> None:
    program = folder / "agent" / "program.py"
    command = {
        "reference": "slipstream.environments.command:Command",
        "args": {
            "command": [sys.executable, str(program), "{task}"],
            "tasks": ["hi"],
            "score_file": "score",
        },
    }
    await check_environments(Scene(counted(folder, **command)))
    loads = num_loads(folder)
    assert loads
    await check_environments(Scene(counted(folder, **command)))
    assert num_loads(folder) == loads
    (folder / "agent" / "helper.py").write_text("changed = True\n")
    await check_environments(Scene(counted(folder, **command)))
    assert num_loads(folder) > loads


async def test_the_doctor_leaves_nothing_to_remember(folder: Path) -> None:
    await check_environments(Scene(counted(folder), leaves_nothing=True))
    assert not (folder / "runs" / "r").exists()


def test_what_passed_long_ago_or_in_the_future_does_not_hold(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    state = state_of(str(file))
    assert state is not None
    passed = Passed(ended_s=1000.0, files={str(file): state}, lines=())
    assert passed.holds(1000.0)
    assert passed.holds(1000.0 + REMEMBERED_S - 1)
    assert not passed.holds(1000.0 + REMEMBERED_S)
    assert not passed.holds(999.0)
    file.unlink()
    assert not passed.holds(1000.0)


@pytest.mark.parametrize("text", ["", "[]", '{"checks": {"k": 1}}', "\x00"])
def test_a_file_that_cannot_be_read_is_no_memory(tmp_path: Path, text: str) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "preflight.json").write_text(text)
    assert Remembered(tmp_path).recall(key_of(["a"], {})) is None
