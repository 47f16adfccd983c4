from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.protocol.access.socket_folder import make_socket_folder, remove_socket_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder


def test_a_folder_is_private_and_is_removed(tmp_path: Path, temporary: Path) -> None:
    note = tmp_path / "logs" / "s.sockets"
    folder = make_socket_folder(note)
    assert folder.parent == temporary
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "socket").touch()
    remove_socket_folder(note)
    assert not list(temporary.iterdir())
    assert not note.exists()
    remove_socket_folder(note)


def test_the_next_of_the_same_note_removes_what_a_killed_one_left(
    tmp_path: Path, temporary: Path
) -> None:
    first = make_socket_folder(tmp_path / "a.sockets")
    (first / "socket").touch()
    other = make_socket_folder(tmp_path / "b.sockets")
    second = make_socket_folder(tmp_path / "a.sockets")
    assert set(temporary.iterdir()) == {other, second}


def test_nothing_else_is_removed_whatever_a_note_says(tmp_path: Path, temporary: Path) -> None:
    note, precious = tmp_path / "a.sockets", tmp_path / "slipstream-precious"
    precious.mkdir()
    other = temporary / "other"
    other.mkdir()
    link = temporary / "slipstream-link"
    link.symlink_to(precious)
    for target in (precious, other, link, temporary / "slipstream-gone"):
        note.write_text(str(target))
        make_socket_folder(note)
    assert precious.is_dir()
    assert other.is_dir()
    assert link.is_symlink()
