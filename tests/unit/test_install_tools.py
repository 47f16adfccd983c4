"""What `make test-tools` installs, with tools that only make files."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

import install_tools
import psutil
import pytest
from install_tools import NotInstalled, Run, Tool
from support.rigs import tools
from support.rigs.waiting import LIMIT_S

PIN = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+")
NPM_PIN = re.compile(r"(@[a-z0-9-]+/)?[a-z0-9-]+@\d+\.\d+\.\d+")


def tool_of(*commands: Sequence[str], name: str = "tool") -> Tool:
    """A tool that these commands install."""

    def install(folder: Path, run: Run) -> None:
        for command in commands:
            run(command, folder)

    return Tool(name, (), (), install)


def test_every_tool_names_tests_and_exact_pins() -> None:
    for tool in install_tools.TOOLS:
        assert tool.tests
        assert all((install_tools.ROOT / test).exists() for test in tool.tests)
        for name in tool.pins:
            pins = install_tools.listed_pins(name)
            assert pins
            pattern = NPM_PIN if name.endswith("-npm") else PIN
            assert [pin for pin in pins if not pattern.fullmatch(pin)] == []


def test_tests_look_where_tools_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in install_tools.TOOLS:
        monkeypatch.delenv(f"SLIPSTREAM_{tool.name.upper()}", raising=False)
        assert tools.folder(tool.name) == install_tools.FOLDER / tool.name
    monkeypatch.setenv("SLIPSTREAM_S3", "/elsewhere")
    assert tools.folder("s3") == Path("/elsewhere")


@pytest.mark.process
def test_a_tool_that_cannot_be_had_is_one_line_and_the_others_are_installed(
    tmp_path: Path,
) -> None:
    broken = tool_of(
        ("touch", "half"),
        ("sh", "-c", "echo first >&2; echo no such package >&2; exit 1"),
        name="broken",
    )
    absent = tool_of(("no-such-program",), name="absent")
    whole = tool_of(("touch", "file"), name="whole")
    causes = install_tools.install([broken, absent, whole], tmp_path, limit_s=LIMIT_S)
    assert causes == {
        "broken": "sh: no such package",
        "absent": "there is no no-such-program here",
    }
    assert list(tmp_path.iterdir()) == [tmp_path / "whole"]
    assert (tmp_path / "whole" / "file").exists()


@pytest.mark.process
def test_an_installed_tool_is_kept_until_its_list_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = tmp_path / "list.txt"
    pins.write_text("package==1\n")
    monkeypatch.setattr(install_tools, "REQUIREMENTS", tmp_path)

    def install(folder: Path, run: Run) -> None:
        run(("sh", "-c", "echo installed >> ../times"), folder)

    tool = Tool("tool", (), ("list",), install)
    for _ in range(2):
        assert install_tools.install([tool], tmp_path / "tools", limit_s=LIMIT_S) == {}
    times = tmp_path / "tools" / "times"
    assert times.read_text().splitlines() == ["installed"]
    pins.write_text("package==2\n")
    install_tools.install([tool], tmp_path / "tools", limit_s=LIMIT_S)
    assert times.read_text().splitlines() == ["installed"] * 2


@pytest.mark.process
def test_what_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    never = tmp_path / "never"
    hangs = tool_of(("sh", "-c", f"tail --retry --follow {never} & wait"), name="hangs")
    causes = install_tools.install([hangs], tmp_path / "tools", limit_s=1.0)
    assert causes == {"hangs": "the time for installing is over"}
    commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if command and str(never) in command]


@pytest.mark.process
def test_a_command_after_the_limit_is_ended_at_once(tmp_path: Path) -> None:
    until = time.monotonic() - 1.0
    with pytest.raises(NotInstalled, match="the time for installing is over"):
        install_tools.completed(["sleep", "1000"], tmp_path, until=until)
