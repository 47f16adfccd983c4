"""Ranks that do not see one folder make no checkpoints."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from slipstream.core.errors import CheckpointError  # noqa: E402
from slipstream.learner.trainer.checkpoints.disk_work import check_shared  # noqa: E402
from slipstream.learner.trainer.ranks.activity import Activity  # noqa: E402
from support.rigs.waiting import LIMIT_S  # noqa: E402


class ThreadRank:
    """What `check_shared` needs of `Ranks`, for ranks that are threads of one process."""

    def __init__(self, rank: int, table: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.is_main = rank, rank == 0
        self.device, self.timeout_s, self.activity = torch.device("cpu"), 20.0, Activity()
        self._table, self._barrier = table, barrier

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self._table[self.rank] = data
        self._barrier.wait(LIMIT_S)
        everybody = list(self._table)
        self._barrier.wait(LIMIT_S)
        return everybody

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert (data is not None) == self.is_main
        return self.gather_bytes(data or b"")[0]


def outcomes(*folders: Path) -> Iterator[str]:
    """What `check_shared` says on each rank; rank n sees `folders[n]`."""
    table, barrier = [b""] * len(folders), threading.Barrier(len(folders))
    ranks = [ThreadRank(n, table, barrier) for n in range(len(folders))]
    with ThreadPoolExecutor(len(folders)) as pool:
        ends = [
            pool.submit(check_shared, folder, rank, limit_s=0.2)  # type: ignore[arg-type]
            for folder, rank in zip(folders, ranks, strict=True)
        ]
    for end in ends:
        error = end.exception()
        assert error is None or isinstance(error, CheckpointError)
        yield str(error or "")


def test_ranks_that_share_a_folder_leave_nothing_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert list(outcomes(folder, folder, folder)) == ["", "", ""]
    assert list(folder.iterdir()) == []


def test_all_ranks_are_told_which_one_sees_another_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    said = list(outcomes(here, here, there))
    for folder, text in zip((here, here, there), said, strict=True):
        rule = "checkpoints need a run.dir that all nodes of the learner share: rank 2 on "
        assert text.startswith(rule)
        assert "rank 1" not in text
        assert f"cannot see what rank 0 writes to {folder}; " in text
    assert list(here.iterdir()) == []
