"""What an interrupted save has left does not stand in the way of the next start."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from slipstream.learner.trainer.checkpoints.checkpoint import Checkpointer  # noqa: E402
from slipstream.learner.trainer.ranks.activity import Activity  # noqa: E402
from support.rigs.controller_runs import make_config  # noqa: E402
from support.rigs.small_disks import small_disk  # noqa: E402


class LoneRank:
    """What a checkpointer needs of `Ranks`, for one rank."""

    rank, world_size, is_main = 0, 1, True
    device, timeout_s, activity = torch.device("cpu"), 20.0, Activity()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert data is not None
        return data


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for few files."""
    with small_disk(tmp_path / "disk", "nr_inodes=20") as folder:
        yield folder


@pytest.mark.process
def test_a_disk_that_an_interrupted_save_has_filled_is_cleared_first(disk: Path) -> None:
    config = make_config(disk, checkpoint__every_steps=1)
    partial = config.run_dir / "checkpoints" / "step-000001.partial"
    partial.mkdir(parents=True)
    with pytest.raises(OSError, match="No space left"):
        for number in itertools.count():
            (partial / str(number)).touch()
    checkpointer = Checkpointer(config, LoneRank(), [])  # type: ignore[arg-type]
    assert checkpointer.load_newest() is None
    assert list(partial.parent.iterdir()) == []
