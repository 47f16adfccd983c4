"""A folder whose files are in a manifest is whole after a kill, and a change of it is refused."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slipstream.core.errors import ProtocolError
from slipstream.core.file_manifest import ManifestedFolder

# Writes, replaces and removes files until it is killed; prints what it has done.
WRITER = """
import sys
from pathlib import Path
from slipstream.core.file_manifest import ManifestedFolder

files = ManifestedFolder(Path(sys.argv[1]))
print("ready", flush=True)
number = int(sys.argv[2])
while True:
    files.write(str(number), b"first")
    files.write(str(number), b"second")
    if number % 2:
        files.remove([str(number - 1), str(number)])
    number += 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = ManifestedFolder(tmp_path)
    files.write("a", b"first")
    files.write("b", b"second")
    files.write("a", b"third")
    files.close()
    return tmp_path


def lines_of(folder: Path) -> list[dict[str, object]]:
    return [
        json.loads(line)
        for line in (folder / "manifest.jsonl").read_bytes().splitlines()
    ]


def test_files_are_read_as_they_were_written(folder: Path) -> None:
    files = ManifestedFolder(folder)
    assert (files.read("a"), files.read("b")) == (b"third", b"second")
    files.remove(["a", "b"])
    assert [path.name for path in folder.iterdir()] == ["manifest.jsonl"]
    assert lines_of(folder)[-1] == {"removed": ["a", "b"]}


def test_the_line_of_a_file_has_its_size_and_digest(folder: Path) -> None:
    digest = hashlib.blake2b(b"second", digest_size=16).hexdigest()
    assert lines_of(folder)[1] == {"path": "b", "num_bytes": 6, "digest": digest}


@pytest.mark.parametrize("content", [b"thirD", b"third\n", b"", b"first"])
def test_a_changed_file_refuses_the_start_and_the_read(
    folder: Path, content: bytes
) -> None:
    files = ManifestedFolder(folder)
    (folder / "a").write_bytes(content)
    with pytest.raises(
        ProtocolError, match="a is not what the run wrote, by its line in"
    ):
        files.read("a")
    files.write("c", b"")
    with pytest.raises(ProtocolError, match="a is not what the run wrote"):
        ManifestedFolder(folder)


def test_a_file_that_is_gone_or_new_refuses_the_start(folder: Path) -> None:
    (folder / "b").unlink()
    with pytest.raises(ProtocolError, match="b is not what the run wrote"):
        ManifestedFolder(folder)
    (folder / "b").write_bytes(b"second")
    (folder / "c").touch()
    with pytest.raises(ProtocolError, match="c is not what the run wrote"):
        ManifestedFolder(folder)


def test_a_change_that_a_kill_has_prevented_is_taken_back(folder: Path) -> None:
    (folder / "a").write_bytes(b"first")
    assert ManifestedFolder(folder).read("a") == b"first"
    # The manifest no longer has the change, which the next start would take back again.
    assert len(lines_of(folder)) == 2
    files = ManifestedFolder(folder)
    files.write("c", b"fourth")
    (folder / "c").unlink()
    ManifestedFolder(folder)
    assert [line["path"] for line in lines_of(folder)] == ["a", "b"]


def test_a_removal_that_a_kill_has_cut_goes_on(folder: Path) -> None:
    files = ManifestedFolder(folder)
    files.remove(["a", "b"])
    (folder / "b").write_bytes(b"second")
    ManifestedFolder(folder)
    assert [path.name for path in folder.iterdir()] == ["manifest.jsonl"]


def test_a_line_that_a_kill_has_cut_goes_and_a_damaged_one_refuses(
    folder: Path,
) -> None:
    manifest = folder / "manifest.jsonl"
    content = manifest.read_bytes()
    manifest.write_bytes(content + b'{"path": "c", "num_by')
    (folder / ".c.7.partial").write_bytes(b"fou")
    ManifestedFolder(folder)
    assert len(lines_of(folder)) == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        "a",
        "b",
        "manifest.jsonl",
    ]
    for line in (b"{}\n", b"[1]\n", b"x\n"):
        manifest.write_bytes(content + line)
        with pytest.raises(
            ProtocolError, match=r"manifest\.jsonl is not what the run wrote"
        ):
            ManifestedFolder(folder)


def test_a_folder_without_a_manifest_gets_one(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"kept")
    files = ManifestedFolder(tmp_path)
    assert files.read("old") == b"kept"
    assert [line["path"] for line in lines_of(tmp_path)] == ["old"]


def test_a_closed_folder_gets_no_more_files(tmp_path: Path) -> None:
    files = ManifestedFolder(tmp_path)
    files.write("a", b"first")
    files.close()
    for change in (lambda: files.write("b", b""), lambda: files.remove(["a"])):
        with pytest.raises(ProtocolError, match="gets no more files: its run is over"):
            change()
    assert files.read("a") == b"first"
    assert len(lines_of(tmp_path)) == 1


def test_a_long_manifest_is_written_anew_by_a_start(tmp_path: Path) -> None:
    files = ManifestedFolder(tmp_path)
    files.write("a", b"")
    files.close()
    line = (tmp_path / "manifest.jsonl").read_bytes()
    (tmp_path / "manifest.jsonl").write_bytes(line * 5000)
    ManifestedFolder(tmp_path)
    assert len(lines_of(tmp_path)) == 1


@pytest.mark.process
def test_a_kill_at_any_moment_leaves_a_folder_that_opens(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    drawn = random.Random(seed)
    for kill in range(8):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(kill * 1_000_000)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        with writer.stdout:
            assert writer.stdout.readline() == "ready\n"
            time.sleep(drawn.uniform(0.0, 0.05))
            os.kill(writer.pid, signal.SIGKILL)
            assert writer.wait() == -signal.SIGKILL
        files = ManifestedFolder(tmp_path)
        for path in tmp_path.iterdir():
            if path.name != "manifest.jsonl":
                assert files.read(path.name) in (b"first", b"second")
        files.close()
