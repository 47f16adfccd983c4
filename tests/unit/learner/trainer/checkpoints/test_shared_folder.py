"""Ranks that do not see one folder make no checkpoints."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from slipstream.core.errors import CheckpointError  # noqa: E402
from slipstream.learner.trainer.checkpoints.disk_work import check_shared  # noqa: E402
from support.ranks.thread_ranks import ThreadRanks, run_ranks  # noqa: E402


def outcomes(*folders: Path) -> list[str]:
    """What `check_shared` says on each rank; rank n sees `folders[n]`."""
    said = [""] * len(folders)

    def check(ranks: ThreadRanks) -> None:
        try:
            check_shared(folders[ranks.rank], ranks, limit_s=0.2)  # type: ignore[arg-type]
        except CheckpointError as error:
            said[ranks.rank] = str(error)

    run_ranks(len(folders), check)
    return said


def test_ranks_that_share_a_folder_leave_nothing_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert outcomes(folder, folder, folder) == ["", "", ""]
    assert list(folder.iterdir()) == []


def test_all_ranks_are_told_which_one_sees_another_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    folders = here, here, there
    for folder, text in zip(folders, outcomes(*folders), strict=True):
        rule = "checkpoints need a run.dir that all nodes of the learner share: rank 2 on "
        assert text.startswith(rule)
        assert "rank 1" not in text
        assert f"cannot see what rank 0 writes to {folder}; " in text
    assert list(here.iterdir()) == []
