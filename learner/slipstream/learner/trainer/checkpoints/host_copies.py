"""Main memory into which a save copies a GPU's tensors.

Getting new pages from the system takes ten times as long as copying bytes into them. So memory is
allocated once, filled with zeros by all threads, pinned for the GPU's copy engine, and kept for
later saves. torch's own pinned memory takes six times as long and a third more bytes: see
docs/adr/0012.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Sequence

import torch
from slipstream.core.errors import CheckpointError
from torch import Tensor

# Least size of a block for a GPU, since each pinning takes time.
LEAST_BYTES = 256 << 20
_ALIGNMENT = 256

logger = logging.getLogger(__name__)

PART_ELEMENTS = 64 << 20


class HostCopies:
    """The main memory for copies of all tensors of one device that a save writes.

    Call `reserve` once; it works in the background. Then, for each save, call `begin`, followed by
    `copy`, or by `empty` and `wait`. Keep this object until the process ends: memory that is freed
    while pinned gives wrong copies later.
    """

    def __init__(self, device: torch.device, *, part_elements: int = PART_ELEMENTS) -> None:
        self.part_elements, self._device = part_elements, device
        self._blocks: list[_Block] = []
        self._reserving: threading.Thread | None = None
        # The error of a reservation that failed; None if it did not fail, or `begin` has raised it.
        self._problem: CheckpointError | None = None

    def reserve(self, sizes: Sequence[int]) -> None:
        """Starts a thread that allocates memory for tensors of these `sizes` in bytes.

        `begin` waits for the thread, and raises its error.
        """

        def take() -> None:
            started_s, num_bytes = time.monotonic(), sum(map(_aligned, sizes))
            try:
                if num_bytes:
                    self._block_for(num_bytes)
            except CheckpointError as error:
                logger.warning("%s", error)
                self._problem = error
            wall_s = time.monotonic() - started_s
            logger.info("%d bytes of memory for checkpoints after %.1f s", num_bytes, wall_s)

        self._reserving = threading.Thread(target=take, name="checkpoint-memory", daemon=True)
        self._reserving.start()

    def begin(self) -> None:
        """Begins a new save, which overwrites the copies of the previous save.

        Waits for the reservation. Raises CheckpointError, once, if the reservation failed.
        """
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        for block in self._blocks:
            block.room = block.num_bytes

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns finished copies in the same order, each in a storage of exactly its size.

        Raises CheckpointError if no more memory can be pinned.
        """
        copies = [self.empty(t.numel(), t.dtype).view(t.shape) for t in tensors]
        for copied, tensor in zip(copies, tensors, strict=True):
            copied.copy_(tensor, non_blocking=True)
        self.wait()
        return copies

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for `count` elements, for non-blocking copies; call `wait` after these.

        Raises CheckpointError if no more memory can be pinned.
        """
        return self._block_for(count * dtype.itemsize).take(count, dtype)

    def wait(self) -> None:
        """Waits until all non-blocking copies are done."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is stored in this memory, where training does not change it."""
        return any(block.holds(tensor.data_ptr()) for block in self._blocks)

    def _block_for(self, num_bytes: int) -> _Block:
        for block in self._blocks:
            if block.room >= _aligned(num_bytes):
                return block
        least = LEAST_BYTES if self._device.type == "cuda" else mmap.PAGESIZE
        self._blocks.append(_Block(max(_aligned(num_bytes), least), self._device))
        return self._blocks[-1]


class _Block:
    """A block of memory that is filled from its start; `room` bytes are left."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocates `num_bytes` of memory.

        Raises CheckpointError if too little is available, or if CUDA cannot pin it.
        """
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
        if device.type != "cuda":
            return
        with torch.cuda.device(device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(self._whole.data_ptr(), num_bytes, 0))
        if code:
            raise CheckpointError(
                f"{num_bytes} bytes of main memory for a checkpoint cannot be pinned: "
                f"CUDA error {code}"
            )

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Returns the first `count` free elements, as a separate storage."""
        start = self.num_bytes - self.room
        self.room -= _aligned(count * dtype.itemsize)
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)

    def holds(self, address: int) -> bool:
        return 0 <= address - self._whole.data_ptr() < self.num_bytes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
