"""Buffers on a GPU that processes of one host share by CUDA IPC; see `shared_buffers`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from cupy.cuda import runtime
from slipstream.core.errors import ConfigError, WeightSyncError


class GpuBuffers:
    """Buffers on one GPU, each a separate CUDA allocation.

    A buffer of torch's allocator would be shared with its whole segment. The sender creates the
    buffers once and keeps them: a slow receiver may still read after the sender stopped waiting.
    """

    def __init__(
        self, handles: Sequence[str], pointers: Sequence[int], num_bytes: int, *, is_owner: bool
    ) -> None:
        self.handles = tuple(handles)
        self.arrays: Sequence[Any] = tuple(_GpuArray(pointer, num_bytes) for pointer in pointers)
        self._pointers = tuple(pointers)
        self._is_owner = is_owner

    @classmethod
    def make(cls, count: int, num_bytes: int, gpu: int) -> GpuBuffers:
        """Creates uninitialized buffers on device `gpu`. Raises ConfigError for lack of memory."""
        # A new thread's current device is 0.
        runtime.setDevice(gpu)
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
    def open(cls, handles: Sequence[str], num_bytes: int, gpu: int) -> GpuBuffers:
        """Opens another process's buffers, on `gpu` or a GPU with peer access to `gpu`.

        Raises WeightSyncError if the driver rejects that.
        """
        runtime.setDevice(gpu)
        pointers = []
        try:
            with contextlib.ExitStack() as stack:
                for handle in handles:
                    # The default flag enables peer access if it is needed.
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
        """Does nothing: the driver frees the buffers when the process ends."""

    def close(self) -> None:
        for pointer in self._pointers:
            if self._is_owner:
                runtime.free(pointer)
            else:
                runtime.ipcCloseMemHandle(pointer)
        self._pointers, self.arrays = (), ()


class _GpuArray:
    """Bytes on a GPU with `__cuda_array_interface__`, which torch uses to avoid a copy."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }
