"""Main memory into which a save copies a GPU's tensors.

Getting new pages from the system takes ten times as long as copying bytes into them. So memory is
allocated by the first save, filled with zeros by all threads, pinned for the GPU's copy engine, and
kept for later saves. torch's own pinned memory takes six times as long and a third more bytes: see
docs/adr/0012.
"""

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from slipstream.core.errors import CheckpointError
from torch import Tensor

# Least size of a block for a GPU, since each pinning takes time.
LEAST_BYTES = 256 << 20
_ALIGNMENT = 256


@dataclass
class _Block:
    memory: mmap.mmap
    # The same memory, uint8 [bytes]; it is filled from its start, and `room` bytes are left.
    whole: Tensor
    room: int


class HostCopies:
    """The main memory for copies of all tensors of one device that a save writes.

    For each save call `begin`, followed by `copy`, or by `empty` and `wait`. Keep this object until
    the process ends: memory that is freed while pinned gives wrong copies later. Methods that take
    memory raise CheckpointError if there is too little, or if CUDA cannot pin it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[_Block] = []

    def begin(self) -> None:
        """Begins a new save, which overwrites the copies of the previous save."""
        for block in self._blocks:
            block.room = len(block.whole)

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns finished copies in the same order, each in a storage of exactly its size."""
        if not tensors:
            return []
        # A single block has room for all: pinning many small ones takes longer.
        self._block_for(sum(_aligned(tensor.nbytes) for tensor in tensors))
        copies = [self.empty(t.numel(), t.dtype).view(t.shape) for t in tensors]
        for copied, tensor in zip(copies, tensors, strict=True):
            copied.copy_(tensor, non_blocking=True)
        self.wait()
        return copies

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for `count` elements, for non-blocking copies; call `wait` after these."""
        if not count:
            return torch.empty(0, dtype=dtype)
        block = self._block_for(count * dtype.itemsize)
        start = len(block.whole) - block.room
        block.room -= _aligned(count * dtype.itemsize)
        return torch.frombuffer(block.memory, dtype=dtype, count=count, offset=start)

    def wait(self) -> None:
        """Waits until all non-blocking copies are done."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is stored in this memory, where training does not change it."""
        address = tensor.data_ptr()
        wholes = [block.whole for block in self._blocks]
        return any(
            0 <= address - block_memory.data_ptr() < len(block_memory) for block_memory in wholes
        )

    def _block_for(self, num_bytes: int) -> _Block:
        for block in self._blocks:
            if block.room >= _aligned(num_bytes):
                return block
        least_bytes = LEAST_BYTES if self._device.type == "cuda" else mmap.PAGESIZE
        size = max(_aligned(num_bytes), least_bytes)
        try:
            # Shared memory would have no large pages.
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CheckpointError(
                f"no {size} bytes of main memory for a checkpoint: {error}"
            ) from error
        # A GPU writes to this memory, so a fork must not make it copy-on-write.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):
                memory.madvise(advice)
        block_memory = torch.frombuffer(memory, dtype=torch.uint8).zero_()
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                if code := int(runtime.cudaHostRegister(block_memory.data_ptr(), size, 0)):
                    raise CheckpointError(
                        f"{size} bytes of main memory for a checkpoint cannot be pinned: "
                        f"CUDA error {code}"
                    )
        self._blocks.append(_Block(memory, block_memory, size))
        return self._blocks[-1]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
