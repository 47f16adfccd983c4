"""The writer of one rank's file of a checkpoint. Import it after `cpu.install`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from slipstream.learner.trainer.checkpoints.files import SyncedFile
from slipstream.learner.trainer.checkpoints.host_copies import HostCopies
from slipstream.protocol.checkpoints import FileEntry
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, _wrap_exception
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult


class HostWriter(FileSystemWriterAsync):  # type: ignore[misc]
    """Holds the data that one rank saves, and writes them as one file.

    Megatron calls `prepare_write_data`, a thread `write`, then Megatron `finish`, and rank 0
    `write_index`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        copy: bool,
        host: HostCopies,
        moved: Callable[[int], None],
        open_file: Callable[[Path, Callable[[int], None]], SyncedFile] = SyncedFile,
    ) -> None:
        """Calls `moved` with the number of bytes of each write."""
        super().__init__(folder)
        self._open_file = open_file
        self._copy, self._host, self._moved = copy, host, moved
        # Entry of the file in the checkpoint's folder; None before it is on the disk or if none.
        self.written: FileEntry | None = None
        self._items: list[tuple[Any, Any]] = []
        self._file_name = ""
        self._index: tuple[Metadata, list[list[WriteResult]]] | None = None
        self._results: list[WriteResult] | WRAPPED_EXCEPTION = []

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Takes all data of the plan; tensors on a device are copied."""
        self._file_name = f"{plan.storage_data.prefix}0.distcp"
        found: list[Any] = [planner.resolve_data(item) for item in plan.items]
        on_device = [data.detach() for data in found if _is_on_device(data)]
        copies = iter(self._host.copy(on_device))
        self._items = [
            (item, next(copies) if _is_on_device(data) else self._as_written(data))
            for item, data in zip(plan.items, found, strict=True)
        ]

    def _as_written(self, data: Any) -> Any:  # noqa: ANN401 - a tensor in main memory, or bytes
        if not isinstance(data, torch.Tensor):
            return data
        tensor = data.detach()
        is_safe = not self._copy or self._host.holds(tensor)
        return tensor if is_safe else tensor.clone()

    def write(self) -> None:
        """Writes and syncs the file; a failure becomes its result, and leaves no part of it."""
        try:
            self._results = self._write()
        except Exception as error:  # noqa: BLE001 - `PendingSave.finish` raises it on all ranks
            self._results = _wrap_exception(error)
            with contextlib.suppress(OSError):
                (Path(self.checkpoint_dir) / self._file_name).unlink(missing_ok=True)
        self._items = []

    def _write(self) -> list[WriteResult]:
        if not self._items:
            return []
        path = Path(self.checkpoint_dir) / self._file_name
        with self._open_file(path, self._moved) as file:
            try:
                results = [
                    _write_item(
                        self.transforms,
                        file,
                        _alone(data),
                        item,
                        self._file_name,
                        SerializationFormat.TORCH_SAVE,
                    )
                    for item, data in self._items
                ]
            except RuntimeError as error:
                # torch raises its own error for a wrong position in the file; the disk's is the
                # cause.
                raise (file.problem or error) from error
            os.fsync(file.fileno())
            self.written = FileEntry(
                path=f"{path.parent.name}/{path.name}", num_bytes=file.tell(), digest=file.digest
            )
        return results

    def retrieve_write_results(self) -> list[WriteResult] | WRAPPED_EXCEPTION:
        """Returns each item's place in the file, or the failure."""
        return self._results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Takes the index of all ranks' files on rank 0; `write_index` writes it."""
        # This copy leaves out plans, which only a later save by Megatron would use.
        kept = {f.name: getattr(metadata, f.name) for f in dataclasses.fields(metadata)}
        self._index = type(metadata)(**kept), results

    def write_index(self) -> None:
        """Writes the index and the format on rank 0; not collective."""
        if self._index is not None:
            super().finish(*self._index)
            save_config(CheckpointingConfig("torch_dist", 1), str(self.checkpoint_dir))


def _alone(data: Any) -> Any:  # noqa: ANN401 - a tensor, or bytes
    """Returns a copy of a view: torch would write the view's whole storage."""
    if not isinstance(data, torch.Tensor):
        return data
    is_view = data.untyped_storage().size() != data.numel() * data.itemsize
    return data.clone() if is_view else data


def _is_on_device(data: Any) -> bool:  # noqa: ANN401 - a tensor, or bytes
    return isinstance(data, torch.Tensor) and data.device.type != "cpu"
