"""Buffers in shared memory."""

import contextlib
import errno
import os
import secrets
from pathlib import Path

import pytest
from slipstream.core.errors import ConfigError, WeightSyncError
from slipstream.protocol.weights.shared_buffers import GpuBuffers, HostBuffers
from support.fakes import fake_cupy

SHARED = Path("/dev/shm")


@pytest.mark.parametrize("what", ["allocate", "share", "open"])
def test_no_memory_of_a_gpu_is_kept_where_there_is_not_all(what: str) -> None:
    with fake_cupy.installed() as cupy:
        if what == "open":
            buffers = GpuBuffers.make(2, 64, gpu=0)
            cupy.open_pointers.clear()
        cupy.fails_second = what
        error = WeightSyncError if what == "open" else ConfigError
        with pytest.raises(error, match="out of memory"):
            if what == "open":
                GpuBuffers.open(buffers.handles, 64, gpu=0)
            else:
                GpuBuffers.make(2, 64, gpu=0)
        assert not cupy.open_pointers


def test_nothing_is_left_where_there_is_no_room_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []
    allocate = os.posix_fallocate

    def name(num_bytes: int) -> str:
        names.append(os.urandom(num_bytes).hex())
        return names[-1]

    def fail_the_second(descriptor: int, start: int, size: int) -> None:
        if len(names) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, start, size)

    monkeypatch.setattr(secrets, "token_hex", name)
    monkeypatch.setattr(os, "posix_fallocate", fail_the_second)
    with pytest.raises(
        ConfigError, match=r"2 buffers of 64 bytes in /dev/shm: .*No space left"
    ):
        HostBuffers.make(2, 64)
    assert len(names) == 2
    assert not [name for name in names if (SHARED / f"slipstream-{name}").exists()]


def open_memory() -> list[str]:
    """The shared memory that this process has open; its other threads open and close files."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in found if path.startswith(str(SHARED)))


def test_no_descriptor_is_left_of_a_buffer_that_is_too_small() -> None:
    buffers = HostBuffers.make(1, 64)
    before = open_memory()
    with pytest.raises(WeightSyncError, match="cannot open the shared buffer"):
        HostBuffers.open(buffers.handles, 1 << 20)
    assert open_memory() == before
    buffers.close()
