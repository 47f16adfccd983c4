"""The part of cupy that the weight transports use, for machines without cupy or a GPU."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from slipstream.protocol.weights import digests
from slipstream.protocol.weights.nccl_group import agreed_settings

Cupy = TypeVar("Cupy", bound="FakeCupy")


class NcclError(RuntimeError):
    """What cupy raises for NCCL."""


class CUDARuntimeError(RuntimeError):
    """What cupy raises for the driver."""


class FakeCupy:
    """What was asked of it, in `seen`; broadcasts are done as soon as they are enqueued."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        # Values that NCCL was told as each member joined.
        self.settings: list[dict[str, str]] = []
        self.communicators: list[Communicator] = []
        # The error that a broadcast raises, and whether it ever ends.
        self.broadcast_error: NcclError | None = None
        self.ends = True
        # "allocate", "open" or "share": memory of which the second piece cannot be had.
        self.fails_second = ""
        self.open_pointers: set[int] = set()
        self._pointers = itertools.count(1 << 20, 1 << 20)

    def modules(self) -> dict[str, ModuleType]:
        package = ModuleType("cupy")
        cuda = ModuleType("cupy.cuda")
        runtime = self._runtime()
        stream = SimpleNamespace(synchronize=lambda: None)
        nccl = SimpleNamespace(
            NcclCommunicator=self._connect, NcclError=NcclError, NCCL_UINT8=1
        )
        vars(cuda).update(
            runtime=runtime,
            nccl=nccl,
            Device=Device,
            Event=lambda: SimpleNamespace(ptr=3, done=self.ends),
            Stream=lambda *, non_blocking: SimpleNamespace(ptr=1),
            alloc=lambda _: SimpleNamespace(ptr=2),
            get_current_stream=lambda: stream,
            ExternalStream=self._stream,
            get_elapsed_time=lambda begin, end: 1.0,
        )
        vars(package).update(
            cuda=cuda, RawKernel=self._kernel, asarray=np.asarray, zeros=np.zeros
        )
        beside = ModuleType("cupyx")
        vars(beside).update(empty_pinned=np.empty)
        return {"cupy": package, "cupy.cuda": cuda, "cupyx": beside}

    def _connect(self, world_size: int, unique_id: bytes, rank: int) -> Communicator:
        self.seen.append("join")
        self.settings.append(agreed_settings(os.environ))
        self.communicators.append(Communicator(self))
        return self.communicators[-1]

    def _kernel(self, source: str, name: str) -> Any:
        assert f" {name}(" in source

        def launch(
            grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]
        ) -> None:
            *_, first_blocks, num_spans, _ = arguments
            assert len(first_blocks) == num_spans + 1
            self.seen.append(f"digest {num_spans} spans")

        return launch

    def _stream(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(
            synchronize=lambda: self.seen.append(f"wait for stream {handle}")
        )

    def _runtime(self) -> SimpleNamespace:
        return SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDevice=lambda: 0,
            setDevice=lambda _: None,
            getDeviceProperties=lambda _: {"multiProcessorCount": 132},
            eventRecord=lambda event, stream: None,
            ipcOpenMemHandle=self._open,
            ipcCloseMemHandle=self.open_pointers.remove,
            ipcGetMemHandle=self._handle_of,
            malloc=self._allocate,
            free=self.open_pointers.remove,
        )

    def _allocate(self, num_bytes: int) -> int:
        return self._take("allocate")

    def _open(self, handle: bytes) -> int:
        return self._take("open")

    def _handle_of(self, pointer: int) -> bytes:
        self._note("share")
        return pointer.to_bytes(8, "little")

    def _take(self, what: str) -> int:
        self._note(what)
        pointer = next(self._pointers)
        self.open_pointers.add(pointer)
        return pointer

    def _note(self, what: str) -> None:
        self.seen.append(what)
        if self.seen[-2:] == [what] * 2 and self.fails_second == what:
            raise CUDARuntimeError("out of memory")


class Device(contextlib.nullcontext):
    """A CUDA device, which is the only one."""

    def use(self) -> None: ...


class Communicator:
    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy = cupy
        self.num_aborts = 0

    def broadcast(self, *_: object) -> None:
        if self._cupy.broadcast_error is not None:
            raise self._cupy.broadcast_error

    def abort(self) -> None:
        self.num_aborts += 1


@contextlib.contextmanager
def installed(fake: Cupy | None = None) -> Iterator[Cupy]:
    """Puts the fake in the place of cupy, which is not installed, and removes it afterwards."""
    fake = fake or FakeCupy()
    with pytest.MonkeyPatch.context() as patch:
        for name, module in fake.modules().items():
            patch.setitem(sys.modules, name, module)
        digests.load_kernel.cache_clear()
        yield fake
    digests.load_kernel.cache_clear()
