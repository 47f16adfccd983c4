"""A save that a thread of each rank writes, in place of Megatron's processes."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import (
    COMMON_STATE_FNAME,
    TorchCommonSaveStrategy,
)
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from slipstream.core.errors import CheckpointError
from slipstream.learner.trainer.checkpoints.disk_work import DiskWork
from slipstream.learner.trainer.checkpoints.host_copies import HostCopies
from slipstream.learner.trainer.checkpoints.host_writer import HostWriter
from slipstream.protocol.checkpoints import FileEntry
from torch.distributed.checkpoint.api import CheckpointException


class PendingSave:
    """A save whose tensors training cannot change: a thread calls `write`, all ranks `finish`."""

    def __init__(
        self, request: AsyncRequest, writer: HostWriter, common: KeptCommonState, disk: DiskWork
    ) -> None:
        self._request, self._writer = request, writer
        self._common, self._disk = common, disk

    def write(self) -> list[FileEntry]:
        """Writes this rank's file and returns its entry; `finish` raises a failure on all ranks.

        Raises OSError when rank 0 cannot write the state that is not tensors.
        """
        self._common.write()
        self._writer.write()
        return [self._writer.written] if self._writer.written is not None else []

    def finish(self) -> None:
        """Writes the index, after `write` has returned on every rank; collective."""
        # Megatron's second function would write the format while the other ranks wait.
        gather, _ = self._request.finalize_fns
        try:
            gather()
        except (Exception, CheckpointException) as error:
            cause = first_cause(error)
            raise CheckpointError(f"the checkpoint could not be written: {cause}") from error
        self._disk.together(self._writer.write_index)


class KeptCommonState(TorchCommonSaveStrategy):  # type: ignore[misc]
    """Keeps rank 0's state that is not tensors, for the thread that writes."""

    def __init__(self) -> None:
        super().__init__("torch", 1)
        self._kept: tuple[Path, bytes] | None = None

    def save_common(self, common_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Keeps the state on rank 0; Megatron calls it."""
        if torch.distributed.get_rank() == 0:
            encoded = io.BytesIO()
            torch.save(common_state_dict, encoded)
            self._kept = Path(checkpoint_dir) / COMMON_STATE_FNAME, encoded.getvalue()

    def write(self) -> None:
        """Writes what is kept; OSError where the disk refuses it."""
        if self._kept is not None:
            path, encoded = self._kept
            path.write_bytes(encoded)


class ThreadedSaveStrategy(torch_dist.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves like Megatron's strategy, with a writer that neither forks nor starts a process."""

    def __init__(self, *, copy: bool, host: HostCopies, moved: Callable[[int], None]) -> None:
        super().__init__("torch_dist", 1)
        self._copy, self._host, self._moved = copy, host, moved
        self.writer: HostWriter

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> AsyncRequest:
        """Plans the save with all ranks and gives the data to `writer`; Megatron calls it."""
        state, *_ = torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        self.writer = HostWriter(
            checkpoint_dir, copy=self._copy, host=self._host, moved=self._moved
        )
        plan, *_ = save_state_dict_async_plan(
            torch_dist.mcore_to_pyt_state_dict(state, False),
            self.writer,
            None,
            0,
            planner=torch_dist.MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )
        return AsyncRequest(self.writer.write, (), [lambda: save_state_dict_async_finalize(*plan)])


def first_cause(error: BaseException) -> str:
    """Returns one line: what failed on the first rank that failed, or the error's first line."""
    if not isinstance(error, CheckpointException):
        return str(error).partition("\n")[0]
    # torch tells the failures of all ranks to the first of them alone.
    for rank, (failure, _) in error.failures.items():
        return f"{type(failure).__name__} on rank {rank}: {failure}"
    return "another rank failed"
