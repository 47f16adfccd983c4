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
from slipstream.protocol.errors import ConfigError, WeightSyncError

_FOLDER = Path("/dev/shm")
_PREFIX = "slipstream-"


class SharedBuffers(Protocol):
    """Some buffers of equal size, in the process that made them or in one that opened them."""

    # One for each buffer: what another process opens it with.
    handles: tuple[str, ...]
    arrays: Sequence[Any]

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
        self.arrays: Sequence[Any] = tuple(np.frombuffer(each, dtype=np.uint8) for each in maps)

    @classmethod
    def make(cls, count: int, num_bytes: int) -> HostBuffers:
        """New ones, filled with zeros; ConfigError when there is no room for them."""
        handles: list[str] = []
        maps: list[mmap.mmap] = []
        try:
            for _ in range(count):
                handles.append(_PREFIX + secrets.token_hex(8))
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
                descriptor = os.open(_FOLDER / handles[-1], flags, 0o600)
                try:
                    os.posix_fallocate(descriptor, 0, num_bytes)
                    maps.append(mmap.mmap(descriptor, num_bytes))
                finally:
                    os.close(descriptor)
        except OSError as error:
            # Those that were made would keep their room for ever.
            _unlink(handles)
            raise ConfigError(
                f"weights.transport ipc needs {count} buffers of {num_bytes:,} bytes in {_FOLDER}: "
                f"{error}; containers get more by --shm-size, a smaller weights.bucket_mib needs "
                "less"
            ) from error
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
        """See `SharedBuffers`."""
        _unlink(self.handles)

    def close(self) -> None:
        """See `SharedBuffers`; the memory itself goes with the last array of the last process."""
        self.hide()
        self.arrays = ()


def make_buffers(count: int, num_bytes: int, card: int | None) -> SharedBuffers:
    """Buffers to share, on CUDA device `card`; None: in main memory. ConfigError without room."""
    if card is None:
        return HostBuffers.make(count, num_bytes)
    from slipstream.protocol.weights.card_buffers import CardBuffers

    return CardBuffers.make(count, num_bytes, card)


def open_buffers(handles: Sequence[str], num_bytes: int, card: int | None) -> SharedBuffers:
    """Buffers that another process shares, for use on `card`; WeightSyncError if they cannot be."""
    if card is None:
        return HostBuffers.open(handles, num_bytes)
    from slipstream.protocol.weights.card_buffers import CardBuffers

    return CardBuffers.open(handles, num_bytes, card)


def _unlink(names: Sequence[str]) -> None:
    for name in names:
        (_FOLDER / name).unlink(missing_ok=True)
