"""Examples of all commands, and what their options take."""

import importlib
import inspect
import shlex
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
import slipstream
from slipstream.client.cli import (
    EXAMPLES,
    FAMILIAR_COMMANDS,
    _parser,
    main,
    named,
    parse,
)
from slipstream.client.run_folder import find_run, settings_of
from slipstream.core.errors import ConfigError
from support.rigs.waiting import LIMIT_S


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_command_is_one_that_it_takes(name, capsys):
    program, command, *rest = shlex.split(EXAMPLES[name])
    assert (program, command) == ("slipstream", name)
    arguments = parse([command, *rest])
    if isinstance(arguments.execute, partial):
        reference, takes_all = arguments.execute.args
        module, _, function = reference.partition(":")
        signature = inspect.signature(
            getattr(importlib.import_module(module), function)
        )
        signature.bind(
            *[arguments] * takes_all, **({} if takes_all else named(arguments))
        )
    with pytest.raises(SystemExit, match="0"):
        parse([name, "--help"])
    assert (
        shlex.split(EXAMPLES[name])[:2]
        == shlex.split(capsys.readouterr().out.rpartition("example: ")[2])[:2]
    )


SHOWS = """
import os, sys
from slipstream.client import cli
cli._parser = lambda: sys.exit(sys.stdout.write("said") + sys.stderr.write("said"))
try:
    cli.main([])
except SystemExit as end:
    with open(sys.argv[1], "w") as file:
        shown = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
        print(end.code, file.fileno(), *shown, file=file)
"""


@pytest.mark.process
def test_a_command_without_its_three_files_has_empty_ones(tmp_path: Path) -> None:
    close = 'exec "$@" <&- >&- 2>&-'
    command = [
        "sh",
        "-c",
        close,
        "sh",
        sys.executable,
        "-c",
        SHOWS,
        str(tmp_path / "said"),
    ]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    assert (tmp_path / "said").read_text().split() == ["8", "3", *["/dev/null"] * 3]


def test_the_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert slipstream.__version__ == project["project"]["version"]
    with pytest.raises(SystemExit, match="0"):
        parse(["--version"])
    assert capsys.readouterr().out == f"slipstream {slipstream.__version__}\n"


def test_every_command_has_an_example() -> None:
    commands = next(
        a.choices for a in _parser()._actions if isinstance(a.choices, dict)
    )
    assert commands.keys() == EXAMPLES.keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train base.toml", "there is no command 'train'; did you mean 'run'?"),
        ("runs", "there is no command 'runs'; did you mean 'status'?"),
        ("verfy runs/a", "there is no command 'verfy'; did you mean 'verify'?"),
        ("zzz", "there is no command 'zzz'; commands are quickstart, run, "),
        ("--help-all", "there is no option '--help-all'; did you mean '--help'?"),
    ],
)
def test_a_command_of_another_name_is_told_by_ours(
    words: str, said: str, capsys
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(words.split())
    assert capsys.readouterr().err.startswith(f"slipstream: {said}")


def test_every_familiar_command_leads_to_one_of_ours() -> None:
    assert {*FAMILIAR_COMMANDS.values()} <= {*EXAMPLES, "--help", "--version"}
    assert not FAMILIAR_COMMANDS.keys() & EXAMPLES.keys()


def test_settings_named_in_place_of_a_run_are_told_the_runs_there_are(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("base.toml").touch()
    with pytest.raises(ConfigError, match="its folder, or its name in runs/"):
        settings_of(Path("base.toml"))
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/config.toml").touch()
    with pytest.raises(
        ConfigError, match="^base.toml: a file, name a run: one of first$"
    ):
        settings_of(Path("base.toml"))
    with pytest.raises(
        ConfigError, match="config.toml: a file, name its folder runs/first$"
    ):
        settings_of(Path("runs/first/config.toml"))


def test_a_run_is_named_by_its_folder_or_below_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (
        "runs/letters",
        "runs/both",
        "runs/code",
        "runs/a/name",
        "both",
        "copy",
        "code",
    ):
        Path(folder).mkdir(parents=True)
    Path("both/config.toml").touch()
    for argument, meant in (
        ("letters", "runs/letters"),
        ("runs/letters", "runs/letters"),
        ("both", "both"),
        ("copy", "copy"),
        ("nothing", "nothing"),
        ("code", "runs/code"),
        ("a/name", "runs/a/name"),
    ):
        with pytest.raises(ConfigError, match=f"^{meant}[:/ ]"):
            find_run(argument)
        for command in ("replay", "verify", "export"):
            assert parse([command, argument]).folder == Path(meant)
        assert parse(["page", argument, "copy"]).folders == [Path(meant), Path("copy")]


@pytest.mark.parametrize(
    "words",
    [
        "export r --out=~/x",
        "page r --out=$X",
        "status --token-file=~/x",
        "check a:B --model=~/x",
    ],
)
def test_a_path_that_the_shell_has_not_expanded_is_refused(words: str, capsys) -> None:
    option, _, path = words.split()[-1].partition("=")
    with pytest.raises(SystemExit, match="2"):
        parse(words.split())
    message = f"argument {option}: a path has no ~ or $ in front, got {path}; see "
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["status", "verify", "page", "replay", "export", "set-aside", "bisect"]
)
def test_a_folder_that_cannot_be_looked_at_is_named_in_one_line(words, capsys) -> None:
    more = {"set-aside": ["1"], "bisect": ["--metric", "loss > 3"]}.get(words, [])
    assert main([words, name := "x" * 300, *more]) == 2
    assert capsys.readouterr().err.endswith(f"{name}/config.toml: File name too long\n")


@pytest.mark.parametrize("words", [["check", "m:C", "--model"], ["check"]])
def test_a_name_that_no_file_can_have_is_told_in_one_line(words, capsys) -> None:
    name = "x" * 300 + ":C"
    assert main([*words, name]) == 2
    assert capsys.readouterr().err == f"slipstream: {name}: File name too long\n"


@pytest.mark.process
async def test_one_environment_is_checked_without_settings(
    tmp_path, monkeypatch, capfd
) -> None:
    (tmp_path / "mine.py").write_text(
        "from slipstream.environments.echo import Echo\nclass Mine(Echo):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = parse(["check", "mine:Mine", "--args", '{"num_symbols": 4}'])
    assert await arguments.execute(arguments) == 0
    shown = capfd.readouterr().out.splitlines()
    (title,) = (line for line in shown if line.startswith("mine:Mine: "))
    assert title.startswith("mine:Mine: 10 tasks, 10 of them played, in ")
    assert shown[-1] == "  ready"
    for line, problem in {
        "check mine:Other": None,
        "check mine:Mine run.steps=3": "checked without settings, got 'run.steps=3'",
        "check run.toml --timeout-s 3": "--timeout-s is for the check of an environment",
        "check mine.py": "mine.py is neither CONFIG.toml nor MODULE:CLASS, as mine:Class is",
        "check mine": "mine is neither CONFIG.toml nor MODULE:CLASS, as mine:Class is",
    }.items():
        arguments = parse(line.split())
        if problem is None:
            assert await arguments.execute(arguments) == 2
            assert "module mine has no class Other" in capfd.readouterr().err
        else:
            with pytest.raises(ConfigError, match=problem):
                await arguments.execute(arguments)


@pytest.mark.parametrize("text", ["-3", "0", "nan", "inf", "1e308", "soon"])
def test_a_time_is_above_nothing_and_no_eternity(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        "rollout-server x.toml --connect-timeout-s",
        "submit m:C --timeout-s",
    ):
        with pytest.raises(SystemExit, match="2"):
            parse([*command.split(), text])
        assert "seconds" in capsys.readouterr().err.splitlines()[-1]


async def test_a_server_of_a_wrong_name_is_refused_before_anything_is_read() -> None:
    arguments = parse(["rollout-server", "nothing.toml", "--server-id", "a b"])
    with pytest.raises(
        ConfigError, match="the id of a rollout server has up to 100 letters"
    ):
        await arguments.execute(arguments)


def test_every_argument_says_what_it_is_for() -> None:
    commands = next(
        a.choices for a in _parser()._actions if isinstance(a.choices, dict)
    )
    assert not [
        (n, a.dest)
        for n, command in commands.items()
        for a in command._actions
        if not a.help
    ]


@pytest.mark.parametrize(
    "line", ["submit m:E", "drain server-1 --reason x", "status --json"]
)
def test_the_run_may_stand_before_and_behind_the_options(line: str, capsys) -> None:
    for options in (["--controller", "h:1"], []):
        first, second, *_ = [*line.split(), ""]
        stated = line.split()
        assert parse([*stated, *options, "mine"]).run == "mine"
        assert parse([*stated, *options]).run is None
        if not second.startswith("-"):
            assert parse([first, second, "mine", *stated[2:], *options]).run == "mine"
        with pytest.raises(SystemExit):
            parse([*stated, *options, "mine", "other"])
    assert "unrecognized arguments: other" in capsys.readouterr().err
