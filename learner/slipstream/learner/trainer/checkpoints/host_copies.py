"""Main memory that a save copies a GPU's tensors to.

Fresh pages cost ten times more than the bytes that go into them. They are taken in large pieces,
filled with zeros by all threads, pinned for the GPU's copy engine, and kept for the next save.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Iterable, Sequence

import torch
from slipstream.protocol.errors import CheckpointError
from torch import Tensor

# Of one piece, unless a tensor is larger.
PIECE_BYTES = 256 << 20
_ALIGNMENT = 256

logger = logging.getLogger(__name__)


class HostCopies:
    """What one save holds in main memory, of tensors of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[_Piece] = []
        self._reserving: threading.Thread | None = None
        # Why what was to be reserved is not there.
        self._problem: CheckpointError | None = None

    def reserve(self, sizes: Sequence[int]) -> None:
        """Takes memory for tensors of so many bytes each, from a thread; `begin` waits for it."""
        self._reserving = threading.Thread(
            target=self._reserve, args=(sizes,), name="checkpoint-memory", daemon=True
        )
        self._reserving.start()

    def begin(self) -> None:
        """A new save begins: what the one before it held is overwritten.

        CheckpointError when memory that was to be reserved could not be had; said once.
        """
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        for piece in self._pieces:
            piece.room = piece.num_bytes

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies, in the same order, each with a storage of exactly its bytes.

        Returns when they are made. CheckpointError when there is no memory that can be pinned.
        """
        copies: dict[int, Tensor] = {}
        # The largest first, as they were reserved: then they find the same room.
        for place in sorted(range(len(tensors)), key=lambda place: -tensors[place].nbytes):
            tensor = tensors[place]
            copies[place] = self.empty(tensor.numel(), tensor.dtype).view(tensor.shape)
            copies[place].copy_(tensor, non_blocking=True)
        self.wait()
        return [copies[place] for place in range(len(tensors))]

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """So many elements for copies that do not block; then `wait`. CheckpointError as above."""
        return self._piece_for(count * dtype.itemsize).take(count, dtype)

    def wait(self) -> None:
        """Returns when all copies are made that did not block."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def holds(self, tensor: Tensor) -> bool:
        """Whether it lies in this memory, and so does not change."""
        return any(piece.holds(tensor.data_ptr()) for piece in self._pieces)

    def _reserve(self, sizes: Iterable[int]) -> None:
        started_s = time.monotonic()
        try:
            for size in sorted(sizes, reverse=True):
                self._piece_for(size).room -= _aligned(size)
        except CheckpointError as error:
            logger.warning("%s", error)
            self._problem = error
        taken = sum(piece.num_bytes for piece in self._pieces)
        wall_s = time.monotonic() - started_s
        logger.info("%d bytes of memory for checkpoints after %.1f s", taken, wall_s)

    def _piece_for(self, num_bytes: int) -> _Piece:
        fitting = [piece for piece in self._pieces if piece.room >= _aligned(num_bytes)]
        if fitting:
            return min(fitting, key=lambda piece: piece.room)
        # Small pieces cost time on a GPU only, where each one is pinned by itself.
        least = PIECE_BYTES if self._device.type == "cuda" else mmap.PAGESIZE
        self._pieces.append(_Piece(max(_aligned(num_bytes), least), self._device))
        return self._pieces[-1]


class _Piece:
    """Memory that is filled from its beginning; `room` bytes are left."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """CheckpointError when there is not so much, or CUDA cannot pin it."""
        try:
            # Memory that is shared has no large pages.
            self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CheckpointError(
                f"no {num_bytes} bytes of main memory for a checkpoint: {error}"
            ) from error
        # A GPU writes to it, so no child may have a copy on write.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):
                self._memory.madvise(advice)
        self.num_bytes = self.room = num_bytes
        self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._whole.zero_()
        if device.type == "cuda":
            _pin(self._whole, device)

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """So many elements, the first that are free; nothing else is in their storage."""
        start = self.num_bytes - self.room
        self.room -= _aligned(count * dtype.itemsize)
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)

    def holds(self, address: int) -> bool:
        return 0 <= address - self._whole.data_ptr() < self.num_bytes


def _pin(memory: Tensor, device: torch.device) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        raise CheckpointError(
            f"{memory.nbytes} bytes of main memory for a checkpoint cannot be pinned: "
            f"CUDA error {error}"
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
