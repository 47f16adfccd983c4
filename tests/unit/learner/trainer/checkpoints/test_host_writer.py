"""What the thread that writes a checkpoint says about its end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from slipstream.learner.trainer.checkpoints.host_copies import HostCopies  # noqa: E402
from slipstream.learner.trainer.checkpoints.host_writer import HostWriter  # noqa: E402
from torch.distributed.checkpoint.filesystem import _StoragePrefix  # noqa: E402
from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType  # noqa: E402


class Broken(io.BytesIO):
    """Data that cannot be written."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def getbuffer(self) -> memoryview:
        raise self._error


class Planner:
    """Finds the data of every item broken."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def resolve_data(self, item: WriteItem) -> Broken:
        return Broken(self._error)


@pytest.mark.parametrize("error", [OSError("full"), MemoryError("no room"), ValueError("no bytes")])
def test_whatever_fails_while_a_checkpoint_is_written_is_a_failure_of_the_save(
    tmp_path: Path, error: Exception
) -> None:
    writer = HostWriter(tmp_path, copy=False, host=HostCopies(torch.device("cpu")))
    item = WriteItem(index=MetadataIndex("a"), type=WriteItemType.BYTE_IO)
    writer.prepare_write_data(SavePlan([item], storage_data=_StoragePrefix("__0_")), Planner(error))
    writer.write()
    # torch's form of a failure that other ranks hear of.
    found, _ = writer.retrieve_write_results()
    assert found is error
