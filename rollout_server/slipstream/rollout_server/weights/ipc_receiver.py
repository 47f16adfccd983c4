"""The ipc transport: buckets are read straight out of the learner's buffers, on one host.

GPUs use CUDA IPC, also where learner and engine share one GPU; CPUs use shared memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.digests import BucketDigests, bucket_digest
from slipstream.protocol.weights.handover import HandoverReceiver
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.protocol.weights.shared_buffers import open_buffers
from slipstream.rollout_server.weights.bucket_receiver import Incoming, Membership, open_digests

_CLOSE_LIMIT_S = 5.0


class IpcReceiver:
    """See `BucketReceiver`: bucket k of an update lies in buffer k modulo their number."""

    enqueues = False

    def __init__(self, membership: Membership, device: torch.device) -> None:
        """Joins and opens the buffers.

        Raises WeightSyncError when that fails or misses the deadline.
        """
        where = membership.communicator
        self._device = device
        if device.type == "cuda":
            from slipstream.protocol.weights.cuda_digests import load_kernel

            torch.cuda.set_device(device)
            # It is loaded here, before the other members wait for this one.
            load_kernel(device.index)
        self._link = HandoverReceiver(
            (where.store_host, where.store_port),
            where.communicator_id,
            membership.rank,
            membership.join_deadline_s,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(self._link.close)
            offer, gpu = self._link.offer, device.index if device.type == "cuda" else None
            self._buffers = open_buffers(offer.handles, offer.num_bytes, gpu)
            stack.callback(self._buffers.close)
            self._memory = [torch.as_tensor(each, device=device) for each in self._buffers.arrays]
            self._link.opened()
            # The link and the buffers stay open.
            stack.pop_all()
        # Held while a thread copies a bucket into its own memory: another thread may call `close`.
        self._copying = threading.Lock()
        # The number of buckets that were read since the communicator was made.
        self._number = 0
        self._digests: BucketDigests | None = None
        # The buckets of `_digests`, and whether these have any.
        self._digested: tuple[tuple[Bucket, ...], bool] = (), False

    def prepare(self, incoming: Incoming) -> Sequence[torch.Tensor]:
        """See `BucketReceiver`."""
        largest = max(bucket.num_bytes for bucket in incoming.buckets)
        if largest > self._memory[0].numel():
            raise WeightSyncError(
                f"a bucket of {largest} bytes does not fit the shared buffers "
                f"of {self._memory[0].numel()}"
            )
        kind = incoming.buckets, incoming.digested
        if self._digests is None or kind != self._digested:
            self._digests = open_digests(incoming.buckets, self._device, digested=kind[1])
            self._digested = kind
        if incoming.own_buffers:
            return []
        return [self._place(place, bucket) for place, bucket in enumerate(incoming.buckets)]

    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        """See `BucketReceiver`."""
        self.prepare(incoming)
        digests = self._digests
        assert digests is not None
        for place, bucket in enumerate(incoming.buckets):
            self._link.wait_filled(self._number, incoming.bucket_deadline_s)
            if incoming.own_buffers:
                with self._copying:
                    data = self._place(place, bucket)
                    data = incoming.memory[place].copy_(data) if incoming.memory else data.clone()
                    digests.add(place, data.data_ptr(), self._handle)
                    self._wait_done(incoming.bucket_deadline_s)
            else:
                data = self._place(place, bucket)
                digests.add(place, data.data_ptr(), self._handle)
                yield data
                # The work that is enqueued so far is the last to read the buffer.
                self._wait_done(incoming.bucket_deadline_s)
            self._link.read(self._number)
            self._number += 1
            if incoming.own_buffers:
                yield data

    def digests(self) -> list[bytes]:
        """See `BucketReceiver`."""
        assert self._digests is not None
        return [bucket_digest(tensors) for tensors in self._digests.read(self._handle)]

    def take_wire(self) -> Wire:
        """See `BucketReceiver`: no bucket travels, so nothing is timed."""
        return Wire()

    def close(self) -> None:
        """See `BucketReceiver`; the engine computes with copies and needs no buffer any more."""
        self._link.close()
        # Buffers that are still being read stay mapped for ever: unmapping them would break a copy.
        if self._copying.acquire(timeout=_CLOSE_LIMIT_S):
            try:
                with contextlib.suppress(WeightSyncError):
                    self._wait_done(_CLOSE_LIMIT_S)
                    self._memory = []
                    self._buffers.close()
            finally:
                self._copying.release()

    @property
    def _handle(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self._device.type == "cuda" else 0

    def _place(self, place: int, bucket: Bucket) -> torch.Tensor:
        if not self._memory:
            raise WeightSyncError("the communicator was left")
        return self._memory[place % len(self._memory)][: bucket.num_bytes]

    def _wait_done(self, deadline_s: float) -> None:
        """Waits for the current stream's work. Raises WeightSyncError after the deadline.

        The work takes a fraction of a millisecond: sleeping would take longer.
        """
        if self._device.type != "cuda":
            return
        done = torch.cuda.current_stream().record_event()
        until_s = time.monotonic() + deadline_s
        while not done.query():
            if time.monotonic() > until_s:
                raise WeightSyncError(f"a bucket was not copied within {deadline_s:g} s")
