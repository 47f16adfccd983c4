"""What an interrupted save has left does not stand in the way of the next start."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from slipstream.learner.trainer.checkpoints.checkpoint import Checkpointer  # noqa: E402
from support.ranks.thread_ranks import run_ranks  # noqa: E402
from support.rigs.controller_runs import make_config  # noqa: E402
from support.rigs.small_disks import small_disk  # noqa: E402


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for few files."""
    with small_disk(tmp_path / "disk", "nr_inodes=20") as folder:
        yield folder


@pytest.mark.process
def test_a_disk_that_an_interrupted_save_has_filled_is_cleared_first(
    disk: Path,
) -> None:
    config = make_config(disk, checkpoint__every_steps=1)
    partial = config.run_dir / "checkpoints" / "step-000001.partial"
    partial.mkdir(parents=True)
    with pytest.raises(OSError, match="No space left"):
        for number in itertools.count():
            (partial / str(number)).touch()
    found: list[object] = []
    run_ranks(
        1, lambda ranks: found.append(Checkpointer(config, ranks, []).load_newest())
    )
    assert found == [None]
    assert list(partial.parent.iterdir()) == []
