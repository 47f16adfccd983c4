"""Main memory into which a save copies a GPU's tensors.

Getting fresh pages takes ten times as long as copying bytes into them. So memory is taken in large
pieces, filled with zeros by all threads, pinned for the GPU's copy engine, and kept for later
saves.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Iterable, Sequence

import torch
from slipstream.core.errors import CheckpointError
from torch import Tensor

# Bytes of one piece, unless a tensor is larger.
PIECE_BYTES = 256 << 20
_ALIGNMENT = 256

logger = logging.getLogger(__name__)

PART_ELEMENTS = 64 << 20


class HostCopies:
    """The copies of one device's tensors that one save holds in main memory.

    `reserve` once, in the background; then for each save `begin`, and `copy` or `empty` and `wait`.
    """

    def __init__(self, device: torch.device, *, part_elements: int = PART_ELEMENTS) -> None:
        """Optimizer state comes in parts of at most `part_elements`, from all ranks together."""
        self.part_elements = part_elements
        self._device = device
        self._pieces: list[_Piece] = []
        self._reserving: threading.Thread | None = None
        # The error of a reservation that failed; None if it did not fail, or `begin` has raised it.
        self._problem: CheckpointError | None = None

    def reserve(self, sizes: Sequence[int]) -> None:
        """Takes memory for tensors of these `sizes` in bytes, in a thread; `begin` waits for it."""
        self._reserving = threading.Thread(
            target=self._reserve, args=(sizes,), name="checkpoint-memory", daemon=True
        )
        self._reserving.start()

    def begin(self) -> None:
        """Begins a new save, which overwrites the copies of the save before it.

        Raises CheckpointError, once, when the reservation failed.
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
        """Returns finished copies in the same order, each with a storage of exactly its bytes.

        Raises CheckpointError when there is no memory that can be pinned.
        """
        copies: dict[int, Tensor] = {}
        # Copies are made in the order of the reservation, largest first, to find the same room.
        for place in sorted(range(len(tensors)), key=lambda place: -tensors[place].nbytes):
            tensor = tensors[place]
            copies[place] = self.empty(tensor.numel(), tensor.dtype).view(tensor.shape)
            copies[place].copy_(tensor, non_blocking=True)
        self.wait()
        return [copies[place] for place in range(len(tensors))]

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for non-blocking copies, which need a `wait`; errors like `copy`."""
        return self._piece_for(count * dtype.itemsize).take(count, dtype)

    def wait(self) -> None:
        """Returns when all non-blocking copies are done."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in this memory, where training does not change it."""
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
        # Small pieces cost time only with a GPU, for which each piece is pinned separately.
        least = PIECE_BYTES if self._device.type == "cuda" else mmap.PAGESIZE
        self._pieces.append(_Piece(max(_aligned(num_bytes), least), self._device))
        return self._pieces[-1]


class _Piece:
    """Memory that is filled from its start; `room` bytes are left."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Takes `num_bytes` of memory; CheckpointError without room, or if CUDA cannot pin it."""
        try:
            # Shared memory would have no large pages.
            self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CheckpointError(
                f"no {num_bytes} bytes of main memory for a checkpoint: {error}"
            ) from error
        # A GPU writes to this memory, so a fork must not make it copy-on-write.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):
                self._memory.madvise(advice)
        self.num_bytes = self.room = num_bytes
        self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._whole.zero_()
        if device.type == "cuda":
            _pin(self._whole, device)

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Returns the first `count` free elements, in a storage of their own."""
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
