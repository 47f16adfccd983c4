"""What models and environments write does not steer the terminal that shows it."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.client.cli import main
from slipstream.client.launch.display import Display
from slipstream.client.log_lines import speak_by
from slipstream.client.terminal import plain, say, this_command
from slipstream.core.logs import as_text
from slipstream.extensions.logs.lines import JsonFormatter
from slipstream.v1 import status_pb2
from support.fakes.small_configs import config_of
from support.rigs.waiting import LIMIT_S

# Clears the screen, sets the title, moves the cursor, turns the writing direction.
HOSTILE = "\x1b[2J\x1b]0;title\x07 a\rb \x9b1A \u202eevil \ud800"


def is_harmless(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


def test_what_a_terminal_would_obey_is_shown_as_escapes(capsys) -> None:
    for text in ("", "reward 0.5", "größer ↗ 模型 🙂", r"C:\x1b"):
        assert plain(text) == text
    shown = plain(HOSTILE)
    assert is_harmless(shown)
    assert shown == (r"\x1b[2J\x1b]0;title\x07 a\rb \x9b1A \u202eevil \ud800")
    assert plain("one\ntwo", indent=3) == "one\n   two"
    say(f"a name: {HOSTILE}\nanother line")
    assert capsys.readouterr().out == f"a name: {shown}\nanother line\n"
    # Settings are read by programs.
    say("a = '\xa0'", as_it_is=True)
    assert capsys.readouterr().out == "a = '\xa0'\n"


def test_a_command_is_told_as_a_shell_takes_it(tmp_path, monkeypatch):
    program = tmp_path / "slipstream"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    words = ["run", "my runs/a.toml", 'controller.address="127.0.0.1:1"']
    as_typed = "run 'my runs/a.toml' 'controller.address=\"127.0.0.1:1\"'"
    for text, shown in (
        ("./slipstream", "./slipstream"),
        (str(program), shlex.quote(str(program))),
        # `python -m` gives the path of the module.
        ("/src/slipstream/client/cli.py", f"{sys.executable} -m slipstream.client.cli"),
    ):
        monkeypatch.setattr(sys, "argv", [text, *words])
        assert this_command() == f"{shown} {as_typed}"
    # A shell that finds the program by its name is given the path.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(program), *words])
    assert this_command() == f"slipstream {as_typed}"


@pytest.mark.process
def test_nobody_has_to_read_what_is_said() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "from slipstream.client.terminal import say\nfor _ in range(3): say('x' * 100_000)"
    process = subprocess.run(
        [sys.executable, "-c", code],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
    )
    os.close(write)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.process
@pytest.mark.parametrize("words", [["doctor"], ["replay"], ["export"]], ids=" ".join)
def test_an_answer_for_which_the_disk_has_no_room_is_missed_in_one_line(
    words, tmp_path
):
    program = (
        "import asyncio, sys; from slipstream.client import cli; "
        "from slipstream.client.launch import launcher, retraining\n"
        "async def answer(*words, **more): launcher.say('found'); return 0\n"
        "retraining.run_replay = launcher.run_export = answer\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    folder = [str(tmp_path)] * (words != ["doctor"])
    with Path("/dev/full").open("w") as out:
        answered = subprocess.run(
            [sys.executable, "-c", program, *words, *folder],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
        )
    line = "slipstream: stdout cannot be written: No space left on device\n"
    assert (answered.returncode, answered.stderr) == (1, line)


@pytest.mark.process
def test_a_terminal_of_another_encoding_shows_escapes_for_what_it_lacks() -> None:
    program = (
        "import sys; from slipstream.client import cli, verify\n"
        "verify.run_verify = lambda folder: verify.say(f'read {folder}') or 0\n"
        "sys.exit(cli.main(['verify', 'é \u0175']))"
    )
    answered = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert (answered.stdout, answered.returncode) == (b"read \xe9 \\u0175\n", 0)


def test_events_cannot_steer_the_screen_of_a_run(tmp_path: Path, capsys) -> None:
    display = Display(config_of(tmp_path))
    display.show(
        status_pb2.Event(
            number=1, text=HOSTILE.removesuffix("\ud800") + "\n0.1 s  fine"
        )
    )
    display.warn(HOSTILE)
    shown = capsys.readouterr().out
    assert is_harmless(shown)
    assert [line[:11].strip(" .0123456789s") for line in shown.splitlines()] == [""] * 3


@pytest.fixture
def for_programs() -> Iterator[None]:
    """Lines of this process are JSON."""
    speak_by(JsonFormatter("command", "first", lambda: None))
    yield
    speak_by(None)


@pytest.mark.usefixtures("for_programs")
def test_every_line_of_a_command_can_be_an_object(tmp_path: Path, capsys) -> None:
    display = Display(config_of(tmp_path))
    display.tell(HOSTILE, step=3)
    warning = status_pb2.SEVERITY_WARNING
    display.show(status_pb2.Event(number=1, text="slow", severity=warning, step=4))
    say("two\nlines")
    display.summary()
    display.fail("no way")
    written = capsys.readouterr()
    shown = [json.loads(line) for line in written.out.splitlines()]
    # A notebook finds the cause behind this word.
    assert as_text(written.err.rstrip()).endswith(" ERROR slipstream: no way")
    (failed,) = [json.loads(line) for line in written.err.splitlines()]
    assert is_harmless(written.out)
    assert [line["message"] for line in shown[:3]] == [HOSTILE, "slow", "two\nlines"]
    assert [line.get("step") for line in shown] == [3, 4, None, None]
    assert [line["level"] for line in shown] == ["INFO", "WARNING", "INFO", "INFO"]
    assert "has no summary" in shown[3]["message"]
    assert (failed["message"], failed["level"]) == ("no way", "ERROR")
    # Settings are read by programs as they are.
    say("a = 1", as_it_is=True)
    assert capsys.readouterr().out == "a = 1\n"


def test_errors_cannot_steer_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no\x1b[2Jsuch.toml"]) == 2
    assert capsys.readouterr().err == "slipstream: no\\x1b[2Jsuch.toml: no such file\n"


@pytest.mark.parametrize("kind", ["terminal", "pipe", "full disk"])
def test_a_run_outlives_the_reader_of_its_screen(
    kind: str, tmp_path: Path, capsys
) -> None:
    if kind == "full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.openpty() if kind == "terminal" else os.pipe()
        os.close(reader)
    with os.fdopen(descriptor, "w") as out, contextlib.redirect_stdout(out):
        display = Display(config_of(tmp_path))
        display.tell("one")
        display.warn("two")
    cause = {
        "terminal": "Input/output error",
        "pipe": "Broken pipe",
        "full disk": "No space left on device",
    }[kind]
    assert capsys.readouterr().err == (
        f"slipstream: no more of the run can be shown here: {cause}; it goes on, and its events "
        f"are in {tmp_path}/test/logs/controller.log\n"
    )


@pytest.mark.process
def test_an_error_that_no_terminal_shows_keeps_its_exit_code() -> None:
    reader, writer = os.openpty()
    os.close(reader)
    words = [
        "-c",
        "import sys; from slipstream.client import cli; sys.exit(cli.main())",
    ]
    ended = subprocess.run(
        [sys.executable, *words, "run", "missing.toml"],
        stdout=writer,
        stderr=writer,
        timeout=LIMIT_S,
    )
    os.close(writer)
    assert ended.returncode == 2
