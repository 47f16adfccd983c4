"""What is written and read of distributed files, and what a save says that failed on a rank."""

import hashlib
import io
import os
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # noqa: E402
from slipstream.core.errors import CheckpointError  # noqa: E402
from slipstream.learner.trainer.checkpoints import disk_work, distributed_files  # noqa: E402
from slipstream.learner.trainer.checkpoints.disk_work import SYNC_BYTES, SyncedFile  # noqa: E402
from slipstream.learner.trainer.checkpoints.distributed_files import HostWriter  # noqa: E402
from slipstream.learner.trainer.checkpoints.host_copies import HostCopies  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
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


def writer_of(
    folder: Path, planner: object, *items: object, host: object = None
) -> HostWriter:
    """A writer of the `items` that `planner` resolves."""
    host = host or HostCopies(torch.device("cpu"))
    writer = HostWriter(folder, host=host, moved=ignore)
    writer.prepare_write_data(
        SavePlan(list(items), storage_data=_StoragePrefix("__0_")), planner
    )
    return writer


@pytest.mark.parametrize(
    "error", [OSError("full"), MemoryError("no room"), ValueError("no bytes")]
)
def test_whatever_fails_while_a_checkpoint_is_written_is_a_failure_of_the_save(
    tmp_path, error
):
    item = WriteItem(index=MetadataIndex("a"), type=WriteItemType.BYTE_IO)
    planner = SimpleNamespace(resolve_data=lambda _: Broken(error))
    writer = writer_of(tmp_path, planner, item)
    writer.write()
    # torch's form of a failure that other ranks hear of.
    write_results, _ = writer.retrieve_write_results()
    assert write_results is error
    # On a full disk journal and logs need the room.
    assert list(tmp_path.iterdir()) == []


def test_a_file_goes_to_the_disk_as_it_is_written(tmp_path: Path, monkeypatch) -> None:
    synced: list[int] = []
    moved: list[int] = []
    # Some pieces are digested in the thread beside the write, small ones before it.
    data = os.urandom(330_000)
    monkeypatch.setattr(disk_work, "SYNC_BYTES", 100_000)
    monkeypatch.setattr(
        os, "fdatasync", lambda file: synced.append(os.fstat(file).st_size)
    )
    with SyncedFile(tmp_path / "file", moved.append) as file:
        assert file.write(data[:30_000]) == 30_000
        assert file.write(memoryview(data)[30_000:320_000]) == 290_000
        assert file.write(data[320_000:]) == 10_000
        assert file.tell() == 330_000
        assert file.digest == hashlib.blake2b(data, digest_size=16).hexdigest()
    assert synced == [100_000, 200_000, 300_000]
    assert sum(moved) == 330_000
    assert (tmp_path / "file").read_bytes() == data


def test_what_is_held_is_not_copied_again_and_a_view_is_written_alone(
    tmp_path, monkeypatch
):
    host = HostCopies(torch.device("cpu"))
    tensor = host.empty(1000, torch.float32).copy_(torch.arange(1000.0))
    parameter = torch.zeros(4)
    planner = SimpleNamespace(
        resolve_data={"held": tensor[10:20], "own": parameter}.__getitem__
    )
    writer = writer_of(tmp_path, planner, "held", "own", host=host)
    (_, held_data), (_, own_data) = writer._items
    assert held_data.data_ptr() == tensor[10:].data_ptr()
    # Training goes on.
    parameter += 1
    assert torch.equal(own_data, torch.zeros(4))
    written: list[torch.Tensor] = []
    files = distributed_files.filesystem
    monkeypatch.setattr(files, "_write_item", lambda *given: written.append(given[2]))
    writer.write()
    assert torch.equal(written[0], torch.arange(10.0, 20.0))
    assert written[0].untyped_storage().nbytes() == 40


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    item = WriteItem(index=MetadataIndex("a"), type=WriteItemType.TENSOR)
    planner = SimpleNamespace(resolve_data=lambda _: torch.zeros(SYNC_BYTES // 4))
    writer = writer_of(tmp_path, planner, item)
    monkeypatch.setattr(os, "fdatasync", full)
    assert writer.write() == []
    write_results, _ = writer.retrieve_write_results()
    assert isinstance(write_results, OSError)
    assert "No space left" in str(write_results)


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        (
            {1: (FULL, StackSummary())},
            "OSError on rank 1: [Errno 28] No space left on device",
        ),
        ({}, "another rank failed"),
    ],
)
def test_a_save_that_torch_finds_failed_is_a_failed_checkpoint(
    failures, cause, monkeypatch
):
    def gather() -> None:
        # torch's own error is no Exception.
        raise CheckpointException("write", failures)

    saver = distributed_files.state_dict_saver
    monkeypatch.setattr(saver, "save_state_dict_async_finalize", gather)
    save = distributed_files.ThreadedSave(host=None, disk=SimpleNamespace(moved=None))
    save._plan = ()
    with pytest.raises(CheckpointError) as caught:
        save.finish()
    assert str(caught.value) == f"the checkpoint could not be written: {cause}"


def test_a_save_that_cannot_be_planned_is_a_failed_checkpoint(tmp_path, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        # Every rank makes its folder while all plan together.
        raise CheckpointException(
            "plan", {1: (OSError(5, "Input/output error"), StackSummary())}
        )

    monkeypatch.setattr(distributed_files.dist_checkpointing, "save", refuse)
    with pytest.raises(CheckpointError) as caught:
        distributed_files.begin_save(
            [], tmp_path, host=None, disk=SimpleNamespace(moved=None)
        )
    assert str(caught.value) == (
        "the checkpoint could not be written: OSError on rank 1: [Errno 5] Input/output error"
    )


def test_a_parameter_lies_where_it_is_in_the_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Begin and end in its bucket; nothing fills the first bucket between its parameters.
    ranges = [{"a": (0, 6), "b": (6, 9)}, {"c": (0, 5)}]
    offsets = [0, 12]
    sizes = [12, 8]
    states = {
        name: {key: torch.randn(end - begin) for key in distributed_files.KEYS}
        for bucket in ranges
        for name, (begin, end) in bucket.items()
    }
    buckets = [
        SimpleNamespace(grad_data=torch.zeros(size), offset=offset)
        for offset, size in zip(offsets, sizes, strict=True)
    ]
    maps = [
        {
            name: {"gbuf_local": SimpleNamespace(start=begin, end=end)}
            for name, (begin, end) in bucket.items()
        }
        for bucket in ranges
    ]
    part = SimpleNamespace(
        data_parallel_group=SimpleNamespace(rank=lambda: 0, size=lambda: 1),
        buffers=[SimpleNamespace(numel=20, numel_unpadded=14, buckets=buckets)],
        gbuf_ranges=[{"float32": [{"param_map": param_map} for param_map in maps]}],
        _get_main_param_and_optimizer_states=states.__getitem__,
    )
    monkeypatch.setattr(distributed_files, "PART_ELEMENTS", 4)
    host = HostCopies(torch.device("cpu"))
    state = distributed_files._gather(part, host, use_gloo_comm=True)
    (whole_state,) = state[0].values()
    assert whole_state["numel_unpadded"] == 14
    for key in distributed_files.KEYS:
        assert len(whole_state[key]) == 20
        for offset, bucket in zip(offsets, ranges, strict=True):
            for name, (begin, end) in bucket.items():
                assert torch.equal(
                    whole_state[key][offset + begin : offset + end], states[name][key]
                )


def test_a_folder_without_its_common_state_is_refused_before_its_index_is_read(
    tmp_path,
) -> None:
    canary = tmp_path / "canary"
    save_config(CheckpointingConfig("torch_dist", 1), str(tmp_path))
    (tmp_path / ".metadata").write_bytes(f"cos\nsystem\n(Vtouch {canary}\ntR.".encode())
    with pytest.raises(
        CheckpointError, match=r"does not hold this model: common\.pt is missing"
    ):
        distributed_files.load_models([], tmp_path, disk=None)
    assert not canary.exists()
