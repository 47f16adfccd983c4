"""What the thread that writes a checkpoint does, and says about its end."""

import functools
import hashlib
import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from slipstream.learner.trainer.checkpoints import disk_work, distributed_files  # noqa: E402
from slipstream.learner.trainer.checkpoints.distributed_files import HostWriter  # noqa: E402
from slipstream.learner.trainer.checkpoints.host_copies import HostCopies  # noqa: E402
from torch.distributed.checkpoint.filesystem import _StoragePrefix  # noqa: E402
from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType  # noqa: E402


def ignore(num_bytes: int) -> None:
    """Takes the written bytes and counts nothing."""


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
def test_whatever_fails_while_a_checkpoint_is_written_is_a_failure_of_the_save(tmp_path, error):
    writer = HostWriter(tmp_path, host=HostCopies(torch.device("cpu")), moved=ignore)
    item = WriteItem(index=MetadataIndex("a"), type=WriteItemType.BYTE_IO)
    writer.prepare_write_data(SavePlan([item], storage_data=_StoragePrefix("__0_")), Planner(error))
    writer.write()
    # torch's form of a failure that other ranks hear of.
    found, _ = writer.retrieve_write_results()
    assert found is error
    # On a full disk journal and logs need the room.
    assert list(tmp_path.iterdir()) == []


def test_a_file_goes_to_the_disk_as_it_is_written(tmp_path: Path) -> None:
    synced: list[int] = []
    moved: list[int] = []
    # Some pieces are digested in the thread beside the write, small ones before it.
    data = os.urandom(330_000)
    with disk_work.SyncedFile(
        tmp_path / "file",
        moved.append,
        sync_bytes=100_000,
        sync=lambda file: synced.append(os.fstat(file).st_size),
    ) as file:
        assert file.write(data[:30_000]) == 30_000
        assert file.write(memoryview(data)[30_000:320_000]) == 290_000
        assert file.write(data[320_000:]) == 10_000
        assert file.tell() == 330_000
        assert file.digest == hashlib.blake2b(data, digest_size=16).hexdigest()
    assert synced == [100_000, 200_000, 300_000]
    assert sum(moved) == 330_000
    assert (tmp_path / "file").read_bytes() == data


def test_what_is_held_is_not_copied_again_and_a_view_is_written_alone(tmp_path, monkeypatch):
    host = HostCopies(torch.device("cpu"))
    whole = host.empty(1000, torch.float32).copy_(torch.arange(1000.0))
    parameter = torch.zeros(4)
    planner = SimpleNamespace(resolve_data={"held": whole[10:20], "own": parameter}.__getitem__)
    writer = HostWriter(tmp_path, host=host, moved=ignore)
    writer.prepare_write_data(
        SimpleNamespace(items=["held", "own"], storage_data=_StoragePrefix("__0_")), planner
    )
    (_, held), (_, own) = writer._items
    assert held.data_ptr() == whole[10:].data_ptr()
    # Training goes on.
    parameter += 1
    assert torch.equal(own, torch.zeros(4))
    written: list[torch.Tensor] = []
    files = distributed_files.filesystem
    monkeypatch.setattr(files, "_write_item", lambda *given: written.append(given[2]))
    writer.write()
    assert torch.equal(written[0], torch.arange(10.0, 20.0))
    assert written[0].untyped_storage().nbytes() == 40


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    writer = HostWriter(
        tmp_path,
        host=HostCopies(torch.device("cpu")),
        moved=ignore,
        open_file=functools.partial(disk_work.SyncedFile, sync=full),
    )
    item = WriteItem(index=MetadataIndex("a"), type=WriteItemType.TENSOR)
    planner = SimpleNamespace(resolve_data=lambda _: torch.zeros(disk_work.SYNC_BYTES // 4))
    writer.prepare_write_data(SavePlan([item], storage_data=_StoragePrefix("__0_")), planner)
    writer.write()
    found, _ = writer.retrieve_write_results()
    assert isinstance(found, OSError)
    assert "No space left" in str(found)
    assert writer.written is None
