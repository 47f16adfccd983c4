"""NCCL on one GPU, through cupy and without torch."""

from __future__ import annotations

from typing import Any

from slipstream.core.errors import WeightSyncError

# Bytes of a warm-up broadcast.
_WARM_UP_BYTES = 16


def make_unique_id() -> bytes:
    """Returns the id by which members of a new communicator meet; the leader calls it."""
    from cupy.cuda import nccl

    return bytes(nccl.get_unique_id())


class CupyNccl:
    """NCCL on one device; `device` is the CUDA device's index in this process."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._kept: tuple[Any, Any] | None = None

    def use(self) -> None:
        """Makes this device the calling thread's current device."""
        import cupy

        cupy.cuda.Device(self._device).use()

    def connect(self, unique_id: bytes, *, rank: int, world_size: int) -> CupyCommunicator:
        """Waits, without a time limit, for all members to join; returns the communicator.

        Raises WeightSyncError when NCCL fails.
        """
        from cupy.cuda import nccl

        self.use()
        try:
            return CupyCommunicator(nccl.NcclCommunicator(world_size, unique_id, rank))
        except nccl.NcclError as error:
            raise WeightSyncError(f"no communicator of {world_size} members: {error}") from error

    def warm_up_room(self) -> tuple[int, int, int]:
        """Returns pointer, bytes and stream for the first broadcast, which opens connections."""
        import cupy

        if self._kept is None:
            self._kept = (cupy.cuda.alloc(_WARM_UP_BYTES), cupy.cuda.Stream(non_blocking=True))
        memory, stream = self._kept
        return memory.ptr, _WARM_UP_BYTES, stream.ptr

    def mark(self, stream: int) -> CudaMark:
        """Returns a mark at the end of the work enqueued on `stream` so far."""
        import cupy

        event = cupy.cuda.Event()
        cupy.cuda.runtime.eventRecord(event.ptr, stream)
        return CudaMark(event)


class CupyCommunicator:
    """Wraps cupy's NcclCommunicator; calling threads must have called `CupyNccl.use` before."""

    def __init__(self, communicator: Any) -> None:  # noqa: ANN401 - cupy has no types
        self._communicator = communicator

    def broadcast(self, pointer: int, num_bytes: int, root: int, stream: int) -> None:
        """Enqueues the broadcast of the bytes at `pointer` from rank `root` to all other ranks.

        Raises WeightSyncError if NCCL rejects it.
        """
        from cupy.cuda import nccl

        try:
            self._communicator.broadcast(pointer, pointer, num_bytes, nccl.NCCL_UINT8, root, stream)
        except nccl.NcclError as error:
            raise WeightSyncError(f"the broadcast of {num_bytes} bytes: {error}") from error

    def abort(self) -> None:
        """Aborts the communicator, which ends this process's waits; call no method afterwards.

        Raises WeightSyncError if NCCL fails.
        """
        from cupy.cuda import nccl

        try:
            self._communicator.abort()
        except nccl.NcclError as error:
            raise WeightSyncError(f"the abort: {error}") from error


class CudaMark:
    """A CUDA event that follows the work queued in a stream so far."""

    def __init__(self, event: Any) -> None:  # noqa: ANN401 - cupy has no types
        self._event = event

    def is_done(self) -> bool:
        """Whether the stream has done the work before this mark; does not wait."""
        return bool(self._event.done)

    def seconds_since(self, before: CudaMark) -> float:
        """Returns the seconds on the device from `before` to this mark; both must be done."""
        import cupy

        return float(cupy.cuda.get_elapsed_time(before._event, self._event)) / 1e3
