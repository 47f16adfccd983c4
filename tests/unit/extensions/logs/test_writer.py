"""The program that writes a log of bounded size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.extensions.logs import launch
from slipstream.extensions.logs.writer import BoundedLog, lines_of
from support.fakes.small_configs import small_config
from support.rigs.waiting import LIMIT_S


def written(folder: Path) -> dict[str, list[str]]:
    """The lines of each log, by its name."""
    paths = sorted(folder.iterdir())
    return {path.name: path.read_text().splitlines() for path in paths}


def test_a_log_is_moved_before_a_line_would_make_it_too_large(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log", max_bytes=10, moved_logs=2)
    for number in range(7):
        log.write(f"{number:04}")
    log.close()
    # Two lines of five bytes; the first two are gone.
    assert written(tmp_path) == {
        "a.log": ["0006"],
        "a.log.1": ["0004", "0005"],
        "a.log.2": ["0002", "0003"],
    }


def test_a_line_that_is_larger_than_a_log_is_whole_in_one(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log", max_bytes=3, moved_logs=1)
    log.write("first line")
    log.write("second")
    log.close()
    assert written(tmp_path) == {"a.log": ["second"], "a.log.1": ["first line"]}


def test_a_start_goes_on_in_the_log_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("123\n")
    for text in ("end", "12345678", "new"):
        log = BoundedLog(path, max_bytes=10, moved_logs=3)
        log.write(text)
        log.close()
    assert written(tmp_path) == {
        "a.log": ["new"],
        "a.log.1": ["12345678"],
        "a.log.2": ["123", "end"],
    }


def test_what_cannot_be_written_is_lost_and_the_next_line_is_tried(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "logs"
    log = BoundedLog(folder / "a.log", max_bytes=100, moved_logs=1)
    log.write("lost")
    folder.mkdir()
    log.write("there")
    log.close()
    assert written(folder) == {"a.log": ["there"]}


def test_lines_come_from_a_pipe_without_an_end_too() -> None:
    source, output = os.pipe()
    os.write(output, b"one\n\xfftwo\nthree")
    os.close(output)
    assert list(lines_of(source)) == ["one", "\N{REPLACEMENT CHARACTER}two", "three"]
    os.close(source)


@pytest.mark.process
def test_the_command_of_the_settings_writes_objects(tmp_path: Path) -> None:
    table = {"format": "json", "max_mib": 0.01, "moved_logs": 2}
    config = small_config(logging=table)
    command = launch.writer_command(config, "server-0", tmp_path / "a.log")
    assert command[0] == sys.executable
    lines = [f"line {number}\n" for number in range(400)]
    subprocess.run(
        command, input="".join(lines), text=True, check=True, timeout=LIMIT_S
    )
    logs = written(tmp_path)
    assert sorted(logs) == ["a.log", "a.log.1", "a.log.2"]
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert max(sizes) <= 10485
    last = json.loads(logs["a.log"][-1])
    assert (last["process"], last["run"]) == ("server-0", config.run.name)
    assert last["message"] == "line 399"


def test_text_stays_text_and_a_run_without_the_table_has_neither() -> None:
    config = small_config(logging={})
    assert launch.formatter(config, "controller") is None
    command = launch.writer_command(config, "controller", Path("a.log"))
    options = [word.partition("=")[0] for word in command]
    assert not {"--process", "--run"} & set(options)
    assert "--max-bytes=67108864" in command
