"""Buffers on a GPU that other processes of the host see, by CUDA IPC; see `shared_buffers`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from cupy.cuda import runtime
from slipstream.protocol.errors import ConfigError, WeightSyncError


class CardBuffers:
    """Allocations of their own on one GPU.

    torch's allocator would share its whole segment in place of the buffer. Made once and kept: a
    receiver that was slow may still read while nobody waits for it any more.
    """

    def __init__(
        self, handles: Sequence[str], pointers: Sequence[int], num_bytes: int, *, is_owner: bool
    ) -> None:
        self.handles = tuple(handles)
        self.arrays: Sequence[Any] = tuple(_CardArray(pointer, num_bytes) for pointer in pointers)
        self._pointers = tuple(pointers)
        self._is_owner = is_owner

    @classmethod
    def make(cls, count: int, num_bytes: int, card: int) -> CardBuffers:
        """New ones on CUDA device `card`; their content is arbitrary. ConfigError without room."""
        # Threads begin with device 0.
        runtime.setDevice(card)
        pointers = []
        try:
            with contextlib.ExitStack() as stack:
                for _ in range(count):
                    pointers.append(runtime.malloc(num_bytes))
                    stack.callback(runtime.free, pointers[-1])
                handles = [runtime.ipcGetMemHandle(pointer).hex() for pointer in pointers]
                stack.pop_all()
        except runtime.CUDARuntimeError as error:
            raise ConfigError(
                f"weights.transport ipc needs {count} buffers of {num_bytes:,} bytes on the "
                f"learner's GPU: {error}; a smaller weights.bucket_mib needs less"
            ) from error
        return cls(handles, pointers, num_bytes, is_owner=True)

    @classmethod
    def open(cls, handles: Sequence[str], num_bytes: int, card: int) -> CardBuffers:
        """Those of another process, on `card` or one with peer access to it; WeightSyncError."""
        runtime.setDevice(card)
        pointers = []
        try:
            with contextlib.ExitStack() as stack:
                for handle in handles:
                    # Peer access, if it needs any, is enabled by the default flag.
                    pointers.append(runtime.ipcOpenMemHandle(bytes.fromhex(handle)))
                    stack.callback(runtime.ipcCloseMemHandle, pointers[-1])
                stack.pop_all()
        except runtime.CUDARuntimeError as error:
            raise WeightSyncError(
                f"cannot open the learner's buffers by CUDA IPC: {error}; containers need "
                "ipc: host and both GPUs, two GPUs need peer access (nvidia-smi topo -p2p r)"
            ) from error
        return cls(handles, pointers, num_bytes, is_owner=False)

    def hide(self) -> None:
        """See `SharedBuffers`: the driver takes them back with the process."""

    def close(self) -> None:
        """See `SharedBuffers`."""
        for pointer in self._pointers:
            if self._is_owner:
                runtime.free(pointer)
            else:
                runtime.ipcCloseMemHandle(pointer)
        self._pointers, self.arrays = (), ()


class _CardArray:
    """Bytes on a GPU as numba and torch describe them to each other."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }
