"""A new file is there whole or not at all, and a later call removes what a killed one has left."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.machine.new_file import new_file

CONTENT = b"0123456789" * 100_000
# Writes the file, a line at a time, and says when it begins.
WRITER = """
import sys
from pathlib import Path
from slipstream.core.machine.new_file import new_file

with new_file(Path(sys.argv[1]), print) as file:
    print("ready", flush=True)
    for _ in range(1000):
        file.write(b"0123456789" * 100)
"""


def test_a_file_has_its_name_behind_the_block(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with new_file(path, pytest.fail) as file:
        file.write(b"text")
        assert not path.exists()
    assert path.read_bytes() == b"text"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        new_file(tmp_path / "out", pytest.fail) as file,
    ):
        file.write(b"text")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "out"
    cause = "out exists already: remove it, or name another file"
    with pytest.raises(ConfigError, match=cause), new_file(path, pytest.fail):
        path.write_bytes(b"mine")
    assert path.read_bytes() == b"mine"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_call_has_left_is_removed_and_told(tmp_path: Path) -> None:
    abandoned = tmp_path / ".out.123.partial"
    unrelated = [".out.x.partial", ".outer.1.partial", ".out.1.part", "out.1.partial"]
    for name in [abandoned.name, *unrelated]:
        (tmp_path / name).touch()
    (tmp_path / ".out.7.partial").mkdir()
    lines: list[str] = []
    with new_file(tmp_path / "out", lines.append):
        pass
    assert lines == [f"{abandoned} is removed, which a call that was killed has left"]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted([*unrelated, ".out.7.partial", "out"])


def test_a_writer_that_lives_keeps_its_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with new_file(path, pytest.fail) as file:
        # As another process, whose number the file has not.
        os.rename(tmp_path / f".out.{os.getpid()}.partial", tmp_path / ".out.1.partial")
        with new_file(path, pytest.fail) as later:
            later.write(b"later")
        os.rename(tmp_path / ".out.1.partial", tmp_path / f".out.{os.getpid()}.partial")
        file.write(b"first")
        path.unlink()
    assert path.read_bytes() == b"first"


@pytest.mark.process
def test_a_kill_at_any_moment_leaves_the_whole_file_or_none(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    drawn = random.Random(seed)
    path = tmp_path / "out"
    for _ in range(10):
        command = [sys.executable, "-c", WRITER, str(path)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        with writer.stdout:
            while writer.stdout.readline() != "ready\n":
                assert writer.poll() is None
            time.sleep(drawn.uniform(0.0, 0.01))
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
        if path.exists():
            assert path.read_bytes() == CONTENT
            path.unlink()
        lines: list[str] = []
        with new_file(path, lines.append):
            pass
        assert [p.name for p in tmp_path.iterdir()] == ["out"]
        assert len(lines) <= 1
        path.unlink()
