"""A save in which a thread of each rank writes one file; Megatron would fork or start a process.

Import this module after `cpu.install`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from slipstream.core.errors import CheckpointError
from slipstream.learner.trainer.checkpoints.disk_work import DiskWork, SyncedFile
from slipstream.learner.trainer.checkpoints.host_copies import HostCopies
from slipstream.protocol.checkpoints import FileEntry
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, CheckpointException, _wrap_exception
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult


class HostWriter(FileSystemWriterAsync):  # type: ignore[misc]
    """Holds the data that one rank saves, and writes them as one file.

    Megatron calls `prepare_write_data`, a thread calls `write`, then Megatron calls `finish`, and
    rank 0 calls `write_index`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: HostCopies,
        moved: Callable[[int], None],
        open_file: Callable[[Path, Callable[[int], None]], SyncedFile] = SyncedFile,
    ) -> None:
        """Takes `host` as in `begin_save`; `moved` gets the byte count of each write."""
        super().__init__(folder)
        self._open_file = open_file
        self._host, self._moved = host, moved
        # Entry of the written file; None until it is on the disk, or if this rank has no file.
        self.written: FileEntry | None = None
        self._items: list[tuple[Any, Any]] = []
        self._file_name = ""
        self._index: tuple[Metadata, list[list[WriteResult]]] | None = None
        self._results: list[WriteResult] | WRAPPED_EXCEPTION = []

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Keeps all data of the plan; copies tensors that training may change."""
        self._file_name = f"{plan.storage_data.prefix}0.distcp"
        found: list[Any] = [planner.resolve_data(item) for item in plan.items]
        found = [data.detach() if isinstance(data, torch.Tensor) else data for data in found]
        copies = iter(self._host.copy([data for data in found if _is_on_device(data)]))
        for item, data in zip(plan.items, found, strict=True):
            kept = data
            if _is_on_device(data):
                kept = next(copies)
            elif isinstance(data, torch.Tensor) and not self._host.holds(data):
                kept = data.clone()
            self._items.append((item, kept))

    def write(self) -> None:
        """Writes and syncs the file; a failure removes it and is kept for `ThreadedSave.finish`."""
        items, self._items = self._items, []
        if not items:
            return
        path = Path(self.checkpoint_dir) / self._file_name
        try:
            with self._open_file(path, self._moved) as file:
                form, results = SerializationFormat.TORCH_SAVE, []
                try:
                    for item, data in items:
                        if isinstance(data, torch.Tensor) and _is_view(data):
                            # torch would write its whole storage.
                            data = data.clone()
                        results.append(
                            _write_item(self.transforms, file, data, item, self._file_name, form)
                        )
                except RuntimeError as error:
                    # torch raises its own error for a wrong position in the file; the disk's error
                    # is the cause.
                    raise (file.problem or error) from error
                os.fsync(file.fileno())
                self._results = results
                self.written = FileEntry(
                    path=f"{path.parent.name}/{path.name}",
                    num_bytes=file.tell(),
                    digest=file.digest,
                )
        except Exception as error:  # noqa: BLE001 - `ThreadedSave.finish` raises it on all ranks
            self._results = _wrap_exception(error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def retrieve_write_results(self) -> list[WriteResult] | WRAPPED_EXCEPTION:
        """Returns each item's position in the file, or the error of `write`."""
        return self._results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keeps the index of all ranks' files on rank 0, until `write_index` writes it."""
        # This copy leaves out plans, which only a later save by Megatron would use.
        kept = {f.name: getattr(metadata, f.name) for f in dataclasses.fields(metadata)}
        self._index = type(metadata)(**kept), results

    def write_index(self) -> None:
        """Writes the index and the checkpoint's format, if this is rank 0; not collective."""
        if self._index is not None:
            super().finish(*self._index)
            save_config(CheckpointingConfig("torch_dist", 1), str(self.checkpoint_dir))


def _is_view(data: torch.Tensor) -> bool:
    return data.untyped_storage().size() != data.numel() * data.itemsize


def _is_on_device(data: Any) -> bool:  # noqa: ANN401 - a tensor, or bytes
    return isinstance(data, torch.Tensor) and data.device.type != "cpu"


class ThreadedSave(torch_dist.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """A save like Megatron's strategy, but its writer neither forks nor starts a process.

    When Megatron has planned it, a thread of each rank calls `write`, then all ranks call `finish`.
    """

    def __init__(self, *, host: HostCopies, disk: DiskWork) -> None:
        super().__init__("torch_dist", 1)
        self._host, self._disk = host, disk
        # On rank 0 the state other than tensors, as the bytes of its file.
        self._common: dict[Path, bytes] = {}

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, *_: object
    ) -> AsyncRequest:
        """Plans the save with all ranks and passes the data to the writer; Megatron calls this."""
        # Megatron would read it with a pickle that can run code: a file of its own is read safely.
        common = sharded_state_dict.pop("common_state").data
        if torch.distributed.get_rank() == 0:
            encoded = io.BytesIO()
            torch.save(common, encoded)
            self._common[Path(checkpoint_dir) / COMMON_STATE_FNAME] = encoded.getvalue()
        state, *_ = torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        self._writer = HostWriter(checkpoint_dir, host=self._host, moved=self._disk.moved)
        self._plan, *_ = save_state_dict_async_plan(
            torch_dist.mcore_to_pyt_state_dict(state, False),
            self._writer,
            None,
            0,
            planner=torch_dist.MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )
        # Megatron would write the format in a function of the request while the ranks wait.
        return AsyncRequest(self._writer.write, (), [])

    def write(self) -> list[FileEntry]:
        """Writes this rank's file; returns its entry, or [] if there is no file or writing fails.

        After a failure `finish` raises on all ranks. Raises OSError if rank 0 cannot write the
        state that is not tensors.
        """
        for path, encoded in self._common.items():
            path.write_bytes(encoded)
        self._writer.write()
        return [self._writer.written] if self._writer.written is not None else []

    def finish(self) -> None:
        """Writes the index after all `write`; raises CheckpointError if one failed. Collective."""
        try:
            save_state_dict_async_finalize(*self._plan)
        except (Exception, CheckpointException) as error:
            cause = first_cause(error)
            raise CheckpointError(f"the checkpoint could not be written: {cause}") from error
        self._disk.together(self._writer.write_index)


def first_cause(error: BaseException) -> str:
    """Returns the first line of `error`, or the first failed rank's cause, if it is known here."""
    if not isinstance(error, CheckpointException):
        return str(error).partition("\n")[0]
    # torch reports the failures of all ranks to the first rank only.
    for rank, (failure, _) in error.failures.items():
        return f"{type(failure).__name__} on rank {rank}: {failure}"
    return "another rank failed"
