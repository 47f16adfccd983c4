"""Buffers in shared memory."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

import pytest
from slipstream.protocol.shared_buffers import HostBuffers

SHARED = Path("/dev/shm")


def test_nothing_is_left_where_there_is_no_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    allocate = os.posix_fallocate

    def name(num_bytes: int) -> str:
        made.append(os.urandom(num_bytes).hex())
        return made[-1]

    def fail_the_second(descriptor: int, start: int, size: int) -> None:
        if len(made) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, start, size)

    monkeypatch.setattr(secrets, "token_hex", name)
    monkeypatch.setattr(os, "posix_fallocate", fail_the_second)
    with pytest.raises(OSError, match="No space left"):
        HostBuffers.make(2, 64)
    assert len(made) == 2
    assert not [each for each in made if (SHARED / f"slipstream-{each}").exists()]
