"""The nccl transport: buckets arrive in the memory of the worker's GPU.

All broadcasts are enqueued in advance on a separate stream. The communicator's watchdog enforces
the deadline of each bucket; the worker's thread waits once, in `digests`.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from slipstream.protocol.weights.digests import load_kernel
from slipstream.protocol.weights.nccl_group import NcclGroup, Wire, set_nccl_environment, use_device
from slipstream.rollout_server.weights.bucket_receiver import BucketReceiver, Incoming
from slipstream.v1 import weights_pb2

# Buffers start at multiples of this.
_ALIGNMENT_BYTES = 512
_NUM_BUFFERS = 2
_NO_CACHE = "NCCL_NO_CACHE"
# The streams that receivers of this process use.
_STREAMS: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


def _nccl_variables() -> dict[str, str]:
    names = (name for name in os.environ if name.startswith("NCCL_") and name != _NO_CACHE)
    return {name: os.environ[name] for name in names}


# vLLM imports this module before it sets variables of its own.
_LAUNCHED = _nccl_variables()


@contextlib.contextmanager
def launched_nccl_variables() -> Iterator[None]:
    """Undoes, in the block, the NCCL variables that vLLM sets for batch-invariant engines.

    The trainer sets none of them, and members with different values hang. vLLM's own
    `unpinned_nccl_env` needs NCCL 2.29.7. An older NCCL reads its variables once, for the first
    communicator. With one worker, that is the communicator for weights.
    """
    pinned = _nccl_variables()
    _set_nccl_variables(_LAUNCHED)
    set_nccl_environment(os.environ)
    try:
        yield
    finally:
        _set_nccl_variables(pinned)


def _set_nccl_variables(variables: Mapping[str, str]) -> None:
    for name in _nccl_variables().keys() - variables.keys():
        del os.environ[name]
    os.environ |= variables


class NcclReceiver(BucketReceiver):
    """A `BucketReceiver` whose broadcasts fill two buffers in turn, or a buffer for each bucket."""

    enqueues = True

    def __init__(
        self, where: weights_pb2.Communicator, rank: int, deadline_s: float, device: torch.device
    ) -> None:
        """Joins the communicator. Raises WeightSyncError when a member misses the deadline."""
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_device(index)
        super().__init__(torch.device("cuda", index))
        use_device(index)
        # The kernel is loaded here, before the other members wait for this one.
        load_kernel(index)
        with launched_nccl_variables():
            self._group = NcclGroup.join(
                index,
                where.unique_id,
                rank=rank,
                world_size=where.world_size,
                deadline_s=deadline_s,
            )
        # The stream of a communicator that could not be aborted stays busy. Torch has 32 streams in
        # all: with a new one for each communicator, two users would sooner or later share one.
        streams = _STREAMS[self._device]
        idle = [stream for stream in streams if stream.query()]
        if not idle:
            # Broadcasts go before copies and digests: one that waits for processors leaves the link
            # idle.
            idle = [torch.cuda.Stream(self._device, priority=-1)]  # type: ignore[no-untyped-call]
            streams += idle
        self._stream = idle[0]
        self._buffers: list[torch.Tensor] = []

    def prepare(self, incoming: Incoming) -> Sequence[torch.Tensor]:
        use_device(self._device.index)
        self._open_digests(incoming)
        if incoming.own_buffers:
            self._buffers = []
            return []
        size = max(bucket.num_bytes for bucket in incoming.buckets)
        size = -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = []
            self._buffers = [self._room(size) for _ in range(_NUM_BUFFERS)]
            # Memory that the allocator hands out may still be in use on the consumer's stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return [
            self._buffers[place % _NUM_BUFFERS][: bucket.num_bytes]
            for place, bucket in enumerate(incoming.buckets)
        ]

    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        """Yields each bucket; never blocks, so `digests` raises the error of a missed deadline."""
        memory = self.prepare(incoming)
        digests = self._digests
        assert digests is not None
        buckets = incoming.buckets
        consumer = torch.cuda.current_stream(self._device)
        arrived = [torch.cuda.Event() for _ in buckets]  # type: ignore[no-untyped-call]
        rooms = dict(enumerate(memory))

        # The first buckets need not wait for the engine's steps under way; only their copies wait.
        def enqueue(place: int) -> None:
            if incoming.own_buffers:
                if incoming.memory:
                    rooms[place] = incoming.memory[place]
                else:
                    rooms[place] = self._room(buckets[place].num_bytes)
                self._stream.wait_stream(consumer)
            self._group.broadcast(
                rooms[place].data_ptr(),
                buckets[place].num_bytes,
                buckets[place].root,
                self._stream.cuda_stream,
                deadline_s=incoming.bucket_deadline_s,
            )
            arrived[place].record(self._stream)

        ahead = min(_NUM_BUFFERS - 1, len(buckets) - 1)
        for place in range(ahead):
            enqueue(place)
        for place in range(len(buckets)):
            if place + ahead < len(buckets):
                enqueue(place + ahead)
            buffer = rooms.pop(place)
            consumer.wait_event(arrived[place])
            # Digests run on the consumer's stream: on ours the next broadcast would wait for them.
            digests.add(place, buffer.data_ptr(), consumer.cuda_stream)
            yield buffer
            # The caller's work on the bucket is done before its memory is written again.
            self._stream.wait_stream(consumer)

    def digests(self) -> list[bytes]:
        # The stream gets here after the last bucket, or when the communicator is aborted.
        digests = super().digests()
        self._group.wait()
        return digests

    def take_wire(self) -> Wire:
        return self._group.take_wire()

    def close(self) -> None:
        self._group.abort()

    def _room(self, num_bytes: int) -> torch.Tensor:
        room = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        # Allocated for the consumer's stream, written on ours.
        room.record_stream(self._stream)
        return room
