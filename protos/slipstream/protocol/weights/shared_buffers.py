"""Buffers that several processes of one host share: on a GPU by CUDA IPC, else in shared memory.

A buffer is an array of bytes that `torch.as_tensor(buffer, device=...)` takes without a copy.
"""

import contextlib
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from slipstream.core.errors import ConfigError, WeightSyncError

FOLDER = Path("/dev/shm")
PREFIX = "slipstream-"


class HostBuffers:
    """Files in /dev/shm that all processes map; `hide` removes the names, not the mappings."""

    def __init__(self, handles: Sequence[str], maps: Sequence[mmap.mmap]) -> None:
        # A handle for each buffer, with which another process opens it.
        self.handles = tuple(handles)
        self.arrays: Sequence[Any] = tuple(np.frombuffer(memory, dtype=np.uint8) for memory in maps)

    @classmethod
    def make(cls, count: int, num_bytes: int) -> Self:
        """Creates buffers filled with zeros. Raises ConfigError if there is not enough memory."""
        handles: list[str] = []
        maps: list[mmap.mmap] = []
        try:
            for _ in range(count):
                handles.append(PREFIX + secrets.token_hex(8))
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
                descriptor = os.open(FOLDER / handles[-1], flags, 0o600)
                try:
                    os.posix_fallocate(descriptor, 0, num_bytes)
                    maps.append(mmap.mmap(descriptor, num_bytes))
                finally:
                    os.close(descriptor)
        except OSError as error:
            # Files that were already created would keep their memory forever.
            _unlink(handles)
            raise ConfigError(
                f"weights.transport ipc needs {count} buffers of {num_bytes:,} bytes in {FOLDER}: "
                f"{error}; containers get more by --shm-size, a smaller weights.bucket_mib needs "
                "less"
            ) from error
        return cls(handles, maps)

    @classmethod
    def open(cls, handles: Sequence[str], num_bytes: int) -> Self:
        """Opens buffers of another process. Raises WeightSyncError if that fails."""
        maps = []
        for name in handles:
            if not name.startswith(PREFIX) or "/" in name:
                raise WeightSyncError(f"{name!r} is no name of a shared buffer")
            try:
                descriptor = os.open(FOLDER / name, os.O_RDWR)
                try:
                    maps.append(mmap.mmap(descriptor, num_bytes))
                finally:
                    os.close(descriptor)
            except (OSError, ValueError) as error:
                raise WeightSyncError(
                    f"cannot open the shared buffer {name}: {error}; do both see one /dev/shm?"
                ) from error
        return cls(handles, maps)

    def hide(self) -> None:
        """Removes the buffers' names, once all processes have opened them; mappings stay."""
        _unlink(self.handles)

    def close(self) -> None:
        """Drops this process's arrays; the memory is freed once no process has such an array."""
        self.hide()
        self.arrays = ()


def _unlink(names: Sequence[str]) -> None:
    for name in names:
        (FOLDER / name).unlink(missing_ok=True)


class GpuBuffers:
    """Buffers on one GPU, each a separate CUDA allocation.

    A buffer of torch's allocator would be shared with its whole segment. The sender creates the
    buffers once and keeps them: a slow receiver may still read after the sender stopped waiting.
    """

    def __init__(self, handles: Sequence[str], pointers: Sequence[int], num_bytes: int) -> None:
        self.handles = tuple(handles)
        self.arrays: Sequence[Any] = tuple(_GpuArray(pointer, num_bytes) for pointer in pointers)
        self._pointers = tuple(pointers)

    @classmethod
    def make(cls, count: int, num_bytes: int, gpu: int) -> Self:
        """Creates uninitialized buffers on device `gpu`. Raises ConfigError for lack of memory."""
        from cupy.cuda import runtime

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
        return cls(handles, pointers, num_bytes)

    @classmethod
    def open(cls, handles: Sequence[str], num_bytes: int, gpu: int) -> Self:
        """Opens another process's buffers, on `gpu` or a GPU with peer access to `gpu`.

        Raises WeightSyncError if the driver rejects that.
        """
        from cupy.cuda import runtime

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
        return cls(handles, pointers, num_bytes)

    def hide(self) -> None:
        """Does nothing: the driver frees the buffers when the process ends."""

    def close(self) -> None:
        """Closes another process's buffers."""
        from cupy.cuda import runtime

        for pointer in self._pointers:
            runtime.ipcCloseMemHandle(pointer)
        self._pointers = ()
        self.arrays = ()


class _GpuArray:
    """Bytes on a GPU with `__cuda_array_interface__`, which torch uses to avoid a copy."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


# Buffers of equal size, in the process that made them or in a process that opened them.
SharedBuffers: TypeAlias = HostBuffers | GpuBuffers
