"""Work of ranks on a disk that is slow, hangs or is full."""

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from slipstream.core.errors import CheckpointError  # noqa: E402
from slipstream.learner.trainer.checkpoints import disk_work  # noqa: E402
from slipstream.learner.trainer.checkpoints.disk_work import (  # noqa: E402
    DiskWork,
    check_shared,
    write_safetensors,
)
from support.ranks.thread_ranks import ThreadRanks, run_ranks  # noqa: E402

LIMIT_S = 0.4


def errors_of(
    folder: Path, work, *, limit_s: float = LIMIT_S
) -> dict[int, BaseException]:
    """What each of two ranks raises."""
    errors: dict[int, BaseException] = {}

    def rank(ranks: ThreadRanks) -> None:
        try:
            DiskWork(folder, ranks).together(lambda: work(ranks.rank))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            errors[ranks.rank] = error

    run_ranks(2, rank, timeout_s=limit_s)
    return errors


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by which a disk is silent: it stands still unless the test moves it."""
    now_s = [0.0]
    monkeypatch.setattr(disk_work, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def test_a_disk_that_moves_bytes_may_take_longer_than_the_limit_of_silence(
    tmp_path, now_s
) -> None:
    found = {}
    notes = {}

    def rank(ranks: ThreadRanks) -> None:
        disk = DiskWork(tmp_path, ranks)

        def work() -> str:
            while ranks.rank == 1 and (
                now_s[0] < 3 * LIMIT_S or ranks.activity.count <= 3
            ):
                now_s[0] += LIMIT_S / 10
                disk.moved(1)
                threading.Event().wait(0.001)
            return f"of rank {ranks.rank}"

        found[ranks.rank] = disk.together(work)
        notes[ranks.rank] = ranks.activity.count

    run_ranks(2, rank, timeout_s=LIMIT_S)
    assert found == {0: "of rank 0", 1: "of rank 1"}
    # Rank 0 has nothing to do and sees that the other one works.
    assert notes[0] == notes[1] > 3


def test_a_disk_that_hangs_ends_the_wait_of_all_ranks_with_its_name(
    tmp_path: Path,
) -> None:
    released = threading.Event()
    try:
        errors = errors_of(tmp_path, lambda rank: rank == 0 or released.wait(30))
    finally:
        released.set()
    line = f"rank 1 moved no byte to or from the disk of {tmp_path} for 0.4 s (learner.timeout_s)"
    assert {rank: str(error) for rank, error in errors.items()} == {0: line, 1: line}
    assert {type(error) for error in errors.values()} == {CheckpointError}


def test_a_disk_that_hangs_while_training_goes_on_is_noticed_between_two_steps(
    tmp_path, now_s
):
    released = threading.Event()

    def rank(ranks: ThreadRanks) -> None:
        disk = DiskWork(tmp_path, ranks)
        future = disk.start(lambda: ranks.rank == 1 or released.wait(30))
        assert not disk.is_done(future)
        ranks.gather_bytes(b"")
        # A step.
        now_s[0] = 2 * LIMIT_S
        with pytest.raises(CheckpointError, match="rank 0 moved no byte"):
            disk.is_done(future)

    try:
        run_ranks(2, rank, timeout_s=LIMIT_S)
    finally:
        released.set()


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    def full(rank: int) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")

    errors = errors_of(tmp_path, full)
    assert {rank: str(error) for rank, error in errors.items()} == {
        0: f"the disk of {tmp_path} failed on another rank",
        1: f"the disk of {tmp_path} failed: [Errno 28] No space left on device",
    }

    def other(rank: int) -> None:
        if rank == 0:
            raise KeyError("weight")

    errors = errors_of(tmp_path, other)
    assert isinstance(errors[0], KeyError)
    assert str(errors[1]) == f"the disk of {tmp_path} failed on another rank"


def test_a_folder_that_cannot_be_copied_is_told_with_its_first_file_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("one", "two"):
        (tmp_path / "in" / name).symlink_to("missing")

    def copy(rank: int) -> None:
        shutil.copytree(tmp_path / "in", tmp_path / f"out-{rank}")

    error = str(errors_of(tmp_path, copy)[0])
    assert error.startswith(
        f"the disk of {tmp_path} failed: [Errno 2] No such file or directory: "
    )
    assert error.count("No such file") == 1
    assert "[(" not in error


def test_what_is_written_is_read_by_safetensors_and_told_byte_by_byte(
    tmp_path: Path,
) -> None:
    tensors = {
        "state": torch.arange(5000, dtype=torch.int64).to(torch.uint8),
        "empty": torch.empty(0, dtype=torch.float32),
        "matrix": torch.linspace(-1, 1, 12).reshape(3, 4).to(torch.bfloat16),
    }
    path = tmp_path / "a.safetensors"
    moved = []
    beside = tmp_path / "beside"
    beside.touch()
    write_safetensors(path, tensors, moved.append)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert sum(moved) == path.stat().st_size
    # The file has the permissions of the files beside it.
    assert path.stat().st_mode == beside.stat().st_mode


def outcomes(*folders: Path) -> list[str]:
    """What `check_shared` says on each rank; rank n sees `folders[n]`."""
    causes = [""] * len(folders)

    def check(ranks: ThreadRanks) -> None:
        try:
            check_shared(folders[ranks.rank], ranks, limit_s=0.2)  # type: ignore[arg-type]
        except CheckpointError as error:
            causes[ranks.rank] = str(error)

    run_ranks(len(folders), check)
    return causes


def test_ranks_that_share_a_folder_leave_nothing_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert outcomes(folder, folder, folder) == ["", "", ""]
    assert list(folder.iterdir()) == []


def test_all_ranks_are_told_which_one_sees_another_folder(tmp_path: Path) -> None:
    here = tmp_path / "here"
    there = tmp_path / "there"
    there.mkdir()
    folders = here, here, there
    for folder, text in zip(folders, outcomes(*folders), strict=True):
        rule = (
            "checkpoints need a run.dir that all nodes of the learner share: rank 2 on "
        )
        assert text.startswith(rule)
        assert "rank 1" not in text
        assert f"cannot see what rank 0 writes to {folder}; " in text
    assert list(here.iterdir()) == []
