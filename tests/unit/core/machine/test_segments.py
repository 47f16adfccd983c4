"""Shared memory of engines that were killed, and of others, which stays."""

import contextlib
import os
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from slipstream.core.machine.files import OwnedFolder, remove_abandoned
from slipstream.core.machine.segments import (
    SHARED_MEMORY,
    note_segments,
    remove_segments,
)


@contextlib.contextmanager
def mapped() -> Iterator[Path]:
    """A segment that this process maps, as one of an engine would."""
    segment = SharedMemory(create=True, size=8)
    path = SHARED_MEMORY / segment.name
    try:
        yield path
    finally:
        segment.close()
        # Python's tracker of segments expects that its owner unlinks it.
        path.touch()
        segment.unlink()


@pytest.fixture
def segment() -> Iterator[Path]:
    with mapped() as path:
        yield path


def test_noted_segments_go_and_others_stay(tmp_path: Path, segment: Path) -> None:
    note_segments(tmp_path, [os.getpid(), 1 << 30])
    with mapped() as other:
        remove_segments(tmp_path)
        assert not segment.exists()
        assert other.exists()


def test_a_segment_that_has_a_noted_name_and_another_inode_stays(
    tmp_path: Path, segment: Path
) -> None:
    inode = segment.stat().st_ino
    (tmp_path / "segments").write_text(f"{inode + 1} {segment.name}\n")
    remove_segments(tmp_path)
    assert segment.exists()


@pytest.mark.parametrize("line", ["{}", "x {}", "{} 1", "1 ../{}", "1 {} more"])
def test_a_line_that_notes_no_segment_removes_nothing(
    tmp_path: Path, segment: Path, line: str
) -> None:
    (tmp_path / "segments").write_text(line.format(segment.name))
    remove_segments(tmp_path)
    assert segment.exists()


def test_memory_that_is_named_after_the_folder_of_an_engine_goes_with_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / f"slipstream-sockets-{os.getpid():08d}"
    path = SHARED_MEMORY / f"{folder.name}-tp:0-[0-1]-cpushm_0"
    path.write_bytes(b"x")
    remove_segments(folder)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["sockets", "sandbox"])
def test_segments_go_with_the_folder_of_an_engine_whose_owner_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment: Path, kind: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = OwnedFolder(kind)  # type: ignore[arg-type]
    note_segments(folder.path, [os.getpid()])
    remove_abandoned()
    assert segment.exists()
    # The kernel closes it when the owner is killed.
    os.close(folder._lock)
    remove_abandoned()
    assert not folder.path.exists()
    # A program that a model wrote could have noted the segment in another folder.
    assert segment.exists() == (kind == "sandbox")
