"""What models and environments write does not steer the terminal that shows it."""

from __future__ import annotations

import importlib.metadata
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.client.cli import main
from slipstream.client.launch.display import Display
from slipstream.client.terminal import plain
from slipstream.v1 import status_pb2
from support.fakes.small_configs import config_of

# Clears the screen, sets the title, moves the cursor, turns the writing direction.
HOSTILE = "\x1b[2J\x1b]0;title\x07 a\rb \x9b1A \u202eevil \ud800"


def is_harmless(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


@pytest.mark.parametrize("text", ["", "reward 0.5", "größer ↗ 模型 🙂", r"C:\x1b"])
def test_text_that_a_terminal_only_shows_stays_as_it_is(text: str) -> None:
    assert plain(text) == text


def test_what_a_terminal_would_obey_is_shown_as_escapes() -> None:
    shown = plain(HOSTILE)
    assert is_harmless(shown)
    assert shown == (r"\x1b[2J\x1b]0;title\x07 a\rb \x9b1A \u202eevil \ud800")


def test_further_lines_stand_below_the_first() -> None:
    assert plain("one\ntwo", indent=3) == "one\n   two"


@pytest.mark.process
def test_nobody_has_to_read_what_is_said() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "from slipstream.client.terminal import say\nfor _ in range(3): say('x' * 100_000)"
    said = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write)
    assert (said.returncode, said.stderr) == (0, "")


def test_events_cannot_steer_the_screen_of_a_run(tmp_path: Path) -> None:
    out = io.StringIO()
    display = Display(config_of(tmp_path), out)
    display.show(status_pb2.Event(number=1, text=HOSTILE.removesuffix("\ud800") + "\n0.1 s  fine"))
    display.warn(HOSTILE)
    assert is_harmless(out.getvalue())
    assert [line[:11].strip(" .0123456789s") for line in out.getvalue().splitlines()] == [""] * 3


def test_errors_cannot_steer_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no\x1b[2Jsuch.toml"]) == 2
    assert capsys.readouterr().err == "slipstream: no\\x1b[2Jsuch.toml: no such file\n"


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"slipstream {importlib.metadata.version('slipstream-rl')}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "a.toml", "--steps", "3"], "--steps 3; a setting is section.key=value; see"),
        (["status", "--steps"], "--steps; see"),
    ],
)
def test_an_option_that_is_no_setting_yet_says_how_settings_are_written(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert f"slipstream: unrecognized arguments: {says}" in capsys.readouterr().err
