"""Which checkpoints are whole, which are kept, and what a damaged one says."""

import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slipstream.core.errors import CheckpointError
from slipstream.core.types import PolicyVersion
from slipstream.protocol import checkpoints
from slipstream.protocol.checkpoints import (
    check_files,
    check_newest,
    checkpoint_path,
    complete_steps,
    first_needed_step,
    folders_left_by,
    passed_over,
    publish_and_retain,
    read_manifest,
    remove_checkpoint,
    remove_folder,
    remove_partial,
    replace_folder,
    steps_to_remove,
    write_kept,
)
from slipstream.protocol.release import RELEASE
from support.fakes.small_checkpoints import save_checkpoint, written_checkpoint
from support.rigs.crashes import crashing_at


def test_a_manifest_is_read_back(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 12)
    assert path == checkpoint_path(tmp_path, 12)
    manifest = read_manifest(path)
    assert manifest.version == PolicyVersion(0, 12)
    assert manifest.num_bytes == 7
    check_files(path, manifest.files)


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    assert complete_steps(tmp_path / "nowhere") == []
    for step in (20, 3, 1_000_000):
        save_checkpoint(tmp_path, step)
    (tmp_path / "step-000021.partial").mkdir()
    (tmp_path / "step-000022").mkdir()
    (tmp_path / "final").mkdir()
    assert complete_steps(tmp_path) == [3, 20, 1_000_000]


def test_every_flipped_bit_of_a_file_is_noticed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1)
    for place in range(7 * 8):
        data = bytearray(b"weights")
        data[place // 8] ^= 1 << place % 8
        (path / "tensors").write_bytes(data)
        with pytest.raises(CheckpointError, match="tensors: its bytes are not those"):
            check_files(path, read_manifest(path).files)


def test_a_shortened_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1)
    (path / "tensors").write_bytes(b"weight")
    with pytest.raises(CheckpointError, match="tensors: it has 6 bytes instead of 7"):
        check_files(path, read_manifest(path).files)
    (path / "tensors").unlink()
    with pytest.raises(CheckpointError, match="tensors: No such file"):
        check_files(path, read_manifest(path).files)


def test_the_last_n_and_the_milestones_are_kept() -> None:
    steps = [10, 20, 30, 40, 50, 60]
    assert steps_to_remove(steps, keep_last=2, keep_every=0) == [10, 20, 30, 40]
    assert steps_to_remove(steps, keep_last=2, keep_every=20) == [10, 30]
    assert steps_to_remove(steps, keep_last=9, keep_every=0) == []
    assert steps_to_remove([], keep_last=1, keep_every=0) == []


def test_versions_stay_as_long_as_a_client_keeps_them(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step)
    write_kept(tmp_path, {1: math.inf, 2: time.time() - 1.0})
    publish_and_retain(written_checkpoint(tmp_path, 5), keep_last=2, keep_every=0)
    assert complete_steps(tmp_path) == [1, 4, 5]


def test_a_removal_that_is_interrupted_leaves_nothing_that_looks_whole(
    tmp_path, monkeypatch
):
    save_checkpoint(tmp_path, 1)
    save_checkpoint(tmp_path, 2)

    def crash(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", crash)
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoint(tmp_path, 1)
    assert complete_steps(tmp_path) == [2]
    assert remove_partial(tmp_path) == ["step-000001.partial"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_the_names_of_all_files_are_durable_before_the_checkpoint_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync = os.fsync
    rename = os.rename

    def noted_sync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    partial = tmp_path / "step-000001.partial"
    (partial / "state" / "deep").mkdir(parents=True)
    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(
        os, "rename", lambda *names: (done.append("rename"), rename(*names))
    )
    publish_and_retain(partial, keep_last=1, keep_every=0)
    before = done[: done.index("rename")]
    assert set(before) == {"state", "deep", "step-000001.partial"}
    assert done[len(before) :] == ["rename", tmp_path.name]


# Python from 3.12 on warns of forks beside threads; this child takes no lock.
@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_kill_at_any_moment_of_a_publication_leaves_the_newest_checkpoint_whole(
    tmp_path,
):
    for change in itertools.count():
        folder = tmp_path / f"crash-{change}"
        for step in (1, 2, 3):
            save_checkpoint(folder, step)
        partial = written_checkpoint(folder, 4)

        def publish(partial: Path = partial) -> Path:
            return publish_and_retain(partial, keep_last=2, keep_every=0)

        ended = crashing_at(change, publish)
        steps = complete_steps(folder)
        # The new checkpoint is there from the first change on: the rename.
        assert steps[-1] == (4 if change else 3)
        assert len(steps) >= 2
        for step in steps:
            path = checkpoint_path(folder, step)
            check_files(path, read_manifest(path).files)
        # The next start removes the rest; the next save removes what is too many.
        remove_partial(folder)
        assert {path.name for path in folder.iterdir()} == {
            f"step-{s:06d}" for s in steps
        }
        if ended:
            assert steps == [3, 4]
            # The new folder is one change; each of two old ones is one, too, and each of its files.
            assert change >= 1 + 2 * 4
            return


def folder_of(path: Path, word: str) -> Path:
    """A folder of three files, each with this word."""
    path.mkdir(parents=True)
    for name in "abc":
        (path / name).write_text(word)
    return path


def words_in(path: Path) -> list[str]:
    return [file.read_text() for file in sorted(path.iterdir())]


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("is_first", [True, False])
def test_a_kill_at_any_moment_of_a_replacement_leaves_a_whole_folder_or_none(
    tmp_path, is_first
):
    for change in itertools.count():
        target = tmp_path / f"crash-{change}" / "out"
        if not is_first:
            folder_of(target, "old")
        partial = folder_of(target.with_name("out.partial"), "new")

        def replace(partial: Path = partial, target: Path = target) -> None:
            replace_folder(partial, target)

        ended = crashing_at(change, replace)
        if target.exists():
            assert words_in(target) in (["old"] * 3, ["new"] * 3)
        left = folders_left_by(target)
        assert {*target.parent.iterdir()} - {target} == set(left)
        # The next call writes the folder anew, and leaves nothing else.
        if not partial.exists():
            folder_of(partial, "newer")
        replace_folder(partial, target)
        assert folders_left_by(target) == []
        assert words_in(target) in (["new"] * 3, ["newer"] * 3)
        if ended:
            assert left == []
            assert change >= (1 if is_first else 2)
            return


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_kill_at_any_moment_of_a_removal_leaves_a_whole_folder_or_none(
    tmp_path: Path,
) -> None:
    for change in itertools.count():
        path = folder_of(tmp_path / f"crash-{change}" / "out", "old")
        ended = crashing_at(change, lambda path=path: remove_folder(path))
        assert path.exists() == (change == 0)
        assert not path.exists() or words_in(path) == ["old"] * 3
        if ended:
            assert folders_left_by(path) == []
            assert change >= 4
            return


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
        lambda path: path.write_bytes(
            path.read_bytes().replace(b'"step": 40', b'"step": 30')
        ),
        "says that it is version 30",
    ),
    "missing": (
        lambda path: path.unlink(),
        "cannot be read: No such file or directory",
    ),
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


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ({"shards": 3}, "'shards'"),
        ({"format": 2}, "'format'"),
        ({"layout": {"tensor": 1}}, "'layout.tensor'"),
    ],
)
def test_nobody_is_told_to_remove_a_checkpoint_of_another_release(
    tmp_path, written, place
):
    path = save_checkpoint(tmp_path, 40)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | written))
    for read in (lambda: read_manifest(path), lambda: check_newest(tmp_path)):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert str(caught.value) == (
            f"{path} is of another release: {place} in manifest.json is not known to slipstream-rl "
            f"{RELEASE}; go on with the release that wrote it"
        )


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
def test_a_version_that_is_made_again_takes_the_place_of_what_is_left_of_it(
    tmp_path, spoil
):
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


def test_a_resume_needs_the_steps_from_the_oldest_of_the_newest_checkpoints_on(
    tmp_path,
) -> None:
    assert first_needed_step(tmp_path, keep_last=1) == 0
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step)
    assert [first_needed_step(tmp_path, keep_last=n) for n in (1, 2, 4, 5)] == [
        4,
        3,
        1,
        0,
    ]
    # A version that a client keeps may go when the client says so.
    write_kept(tmp_path, {3: math.inf})
    assert first_needed_step(tmp_path, keep_last=2) == 2
