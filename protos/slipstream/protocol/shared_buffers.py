"""Buffers that several processes of one host see: on a GPU by CUDA IPC, else in shared memory.

A buffer is what `torch.as_tensor(buffer, device=...)` takes without a copy: an array of bytes.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from slipstream.protocol.errors import WeightSyncError

_FOLDER = Path("/dev/shm")
_PREFIX = "slipstream-"


class SharedBuffers(Protocol):
    """Some buffers of equal size, in the process that made them or in one that opened them."""

    # One for each buffer: what another process opens it with.
    handles: tuple[str, ...]
    arrays: tuple[Any, ...]

    def hide(self) -> None:
        """Nobody opens them any more: nothing is left behind, however processes end."""
        ...

    def close(self) -> None:
        """Gives them back; nobody may touch them any more in this process."""
        ...


class HostBuffers:
    """Files in /dev/shm, each mapped by all; they vanish with the last process that has one."""

    def __init__(self, handles: Sequence[str], maps: Sequence[mmap.mmap]) -> None:
        self.handles = tuple(handles)
        self.arrays = tuple(np.frombuffer(each, dtype=np.uint8) for each in maps)

    @classmethod
    def make(cls, count: int, num_bytes: int) -> HostBuffers:
        """New ones, filled with zeros."""
        handles, maps = [], []
        for _ in range(count):
            name = _PREFIX + secrets.token_hex(8)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            descriptor = os.open(_FOLDER / name, flags, 0o600)
            os.posix_fallocate(descriptor, 0, num_bytes)
            maps.append(mmap.mmap(descriptor, num_bytes))
            os.close(descriptor)
            handles.append(name)
        return cls(handles, maps)

    @classmethod
    def open(cls, handles: Sequence[str], num_bytes: int) -> HostBuffers:
        """Those that another process has made; WeightSyncError when they are not there."""
        maps = []
        for name in handles:
            if not name.startswith(_PREFIX) or "/" in name:
                raise WeightSyncError(f"{name!r} is no name of a shared buffer")
            try:
                descriptor = os.open(_FOLDER / name, os.O_RDWR)
                maps.append(mmap.mmap(descriptor, num_bytes))
                os.close(descriptor)
            except (OSError, ValueError) as error:
                raise WeightSyncError(
                    f"cannot open the shared buffer {name}: {error}; do both see one /dev/shm?"
                ) from error
        return cls(handles, maps)

    def hide(self) -> None:
        """See `SharedBuffers`."""
        for name in self.handles:
            (_FOLDER / name).unlink(missing_ok=True)

    def close(self) -> None:
        """See `SharedBuffers`; the memory itself goes with the last array of the last process."""
        self.hide()
        self.arrays = ()


class CardBuffers:
    """Allocations of their own on one GPU.

    torch's allocator would share its whole segment in place of the buffer. Made once and kept: a
    receiver that was slow may still read while nobody waits for it any more.
    """

    def __init__(
        self, handles: Sequence[str], pointers: Sequence[int], num_bytes: int, *, is_owner: bool
    ) -> None:
        self.handles = tuple(handles)
        self.arrays = tuple(_CardArray(pointer, num_bytes) for pointer in pointers)
        self._pointers = tuple(pointers)
        self._is_owner = is_owner

    @classmethod
    def make(cls, count: int, num_bytes: int, card: int) -> CardBuffers:
        """New ones on CUDA device `card`; their content is arbitrary."""
        from cupy.cuda import runtime

        # Threads begin with device 0.
        runtime.setDevice(card)
        pointers = [runtime.malloc(num_bytes) for _ in range(count)]
        handles = [runtime.ipcGetMemHandle(pointer).hex() for pointer in pointers]
        return cls(handles, pointers, num_bytes, is_owner=True)

    @classmethod
    def open(cls, handles: Sequence[str], num_bytes: int, card: int) -> CardBuffers:
        """Those of another process, on `card` or one with peer access to it; WeightSyncError."""
        from cupy.cuda import runtime

        runtime.setDevice(card)
        try:
            # Peer access, if it needs any, is enabled by the default flag.
            pointers = [runtime.ipcOpenMemHandle(bytes.fromhex(handle)) for handle in handles]
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
        from cupy.cuda import runtime

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


def make_buffers(count: int, num_bytes: int, card: int | None) -> HostBuffers | CardBuffers:
    """Buffers to share, on CUDA device `card`; None: in main memory."""
    if card is None:
        return HostBuffers.make(count, num_bytes)
    return CardBuffers.make(count, num_bytes, card)


def open_buffers(
    handles: Sequence[str], num_bytes: int, card: int | None
) -> HostBuffers | CardBuffers:
    """Buffers that another process shares, for use on `card`; WeightSyncError if they cannot be."""
    if card is None:
        return HostBuffers.open(handles, num_bytes)
    return CardBuffers.open(handles, num_bytes, card)
