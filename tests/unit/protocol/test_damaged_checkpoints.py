"""Folders that are no whole checkpoints: one line with what to do, and what is passed over."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from slipstream.core.errors import CheckpointError
from slipstream.protocol.checkpoints import (
    check_newest,
    complete_steps,
    passed_over,
    read_manifest,
    remove_partial,
)
from support.fakes.small_checkpoints import save_checkpoint


def folder_in_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "is damaged"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:99]), "is damaged"),
    "NUL block": (lambda path: path.write_bytes(bytes(512)), "is damaged"),
    "a list": (lambda path: path.write_bytes(b"[1]"), "is damaged"),
    "another object": (lambda path: path.write_bytes(b"{}"), "is damaged"),
    "no UTF-8": (lambda path: path.write_bytes(b"\xff"), "is damaged"),
    "deep": (lambda path: path.write_bytes(b"[" * 100_000), "is damaged"),
    "of another version": (
        lambda path: path.write_bytes(path.read_bytes().replace(b'"step": 40', b'"step": 30')),
        "says that it is version 30",
    ),
    "missing": (lambda path: path.unlink(), "cannot be read: No such file or directory"),
    "folder": (folder_in_place, "cannot be read: Is a directory"),
}


@pytest.mark.parametrize(("spoil", "cause"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_manifest_is_one_line_with_what_to_remove(tmp_path, spoil, cause):
    save_checkpoint(tmp_path, 30)
    path = save_checkpoint(tmp_path, 40)
    spoil(path / "manifest.json")
    with pytest.raises(CheckpointError) as caught:
        read_manifest(path)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{path} is no whole checkpoint: manifest.json {cause}")
    assert line.endswith("; remove that folder to go on from an older checkpoint")
    if (path / "manifest.json").is_file():
        # The folder looks whole, so it is not passed over.
        with pytest.raises(CheckpointError, match="remove that folder"):
            check_newest(tmp_path)


def file_in_place(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


MISSING: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "a folder for a manifest": lambda path: folder_in_place(path / "manifest.json"),
    "a file": file_in_place,
}


@pytest.mark.parametrize("spoil", MISSING.values(), ids=MISSING.keys())
def test_what_is_newer_than_the_newest_whole_checkpoint_is_named(tmp_path, spoil):
    save_checkpoint(tmp_path, 20)
    save_checkpoint(tmp_path, 30)
    assert passed_over(tmp_path) == []
    spoil(save_checkpoint(tmp_path, 10))
    # Older checkpoints are not checked.
    assert passed_over(tmp_path) == []
    path = save_checkpoint(tmp_path, 40)
    spoil(path)
    (tmp_path / "step-000050.partial").mkdir()
    (tmp_path / "step-50").touch()
    assert complete_steps(tmp_path) == [20, 30]
    assert passed_over(tmp_path) == [path]
    check_newest(tmp_path)


@pytest.mark.parametrize("spoil", MISSING.values(), ids=MISSING.keys())
def test_a_version_that_is_made_again_takes_the_place_of_what_is_left_of_it(tmp_path, spoil):
    path = save_checkpoint(tmp_path, 40)
    spoil(path)
    save_checkpoint(tmp_path, 40)
    assert read_manifest(path).step == 40
    assert (tmp_path / "step-000040.damaged-1").exists()
    assert complete_steps(tmp_path) == [40]
    assert passed_over(tmp_path) == []


def test_no_checkpoints_or_a_file_in_their_place_are_none(tmp_path: Path) -> None:
    assert passed_over(tmp_path / "nowhere") == []
    check_newest(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert passed_over(tmp_path / "file") == []
    assert complete_steps(tmp_path / "file") == []
    with pytest.raises(CheckpointError, match="file is no folder: put it back"):
        check_newest(tmp_path / "file")


def test_files_and_links_that_end_in_partial_are_removed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-000001.partial").touch()
    (folder / "step-000002.partial").symlink_to(tmp_path / "elsewhere")
    assert remove_partial(folder) == ["step-000001.partial", "step-000002.partial"]
    assert not list(folder.iterdir())
    assert (tmp_path / "elsewhere" / "kept").exists()
