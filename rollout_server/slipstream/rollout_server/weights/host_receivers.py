"""The transports whose buckets arrive in main memory: gloo over TCP, and files from storage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.access.exposure import local_address
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.digests import BucketDigests, bucket_digest
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.rollout_server.weights.bucket_receiver import Incoming, Membership, open_digests
from torch._C import _distributed_c10d as c10d


class HostReceiver:
    """Receives buckets in main memory, two buffers in turn; a transport says how one is taken."""

    enqueues = False

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._digests: BucketDigests | None = None

    def prepare(self, incoming: Incoming) -> Sequence[torch.Tensor]:
        """See `BucketReceiver`: two buffers in turn."""
        if incoming.own_buffers:
            self._buffers = []
            return []
        size = max(bucket.num_bytes for bucket in incoming.buckets)
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        return [
            self._buffers[place % 2][: bucket.num_bytes]
            for place, bucket in enumerate(incoming.buckets)
        ]

    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        """See `BucketReceiver`; the tensors lie in main memory, or in `incoming.memory`."""
        digests = self._digests = open_digests(
            incoming.buckets, torch.device("cpu"), digested=incoming.digested
        )
        memory = self.prepare(incoming)
        self._begin(incoming)
        for place, bucket in enumerate(incoming.buckets):
            buffer = memory[place] if memory else torch.empty(bucket.num_bytes, dtype=torch.uint8)
            self._take(bucket, buffer, incoming.bucket_deadline_s)
            digests.add(place, buffer.data_ptr(), 0)
            yield incoming.memory[place].copy_(buffer) if incoming.memory else buffer

    def digests(self) -> list[bytes]:
        """See `BucketReceiver`."""
        assert self._digests is not None
        return [bucket_digest(tensors) for tensors in self._digests.read(0)]

    def take_wire(self) -> Wire:
        """See `BucketReceiver`: not timed, since a bucket is received only when it is asked for."""
        return Wire()

    def _begin(self, incoming: Incoming) -> None:
        """Begins an update."""

    def _take(self, bucket: Bucket, buffer: torch.Tensor, deadline_s: float) -> None:
        """Fills `buffer` with the next bucket. Raises WeightSyncError after `deadline_s`."""
        raise NotImplementedError


class GlooReceiver(HostReceiver):
    """See `BucketReceiver`: each bucket's sender broadcasts it; all waits are inside the calls."""

    def __init__(self, membership: Membership, device: torch.device) -> None:
        """Joins the communicator. Raises WeightSyncError when a member misses the deadline."""
        super().__init__()
        communicator = membership.communicator
        timeout = timedelta(seconds=membership.join_deadline_s)
        try:
            self._store: c10d.Store | None = c10d.TCPStore(
                communicator.store_host,
                communicator.store_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timeout,
            )
            self._group: Any = _gloo_group(
                c10d.PrefixStore(communicator.communicator_id, self._store),
                membership.rank,
                communicator.world_size,
                local_address(communicator.store_host, communicator.store_port),
                timeout,
            )
        except RuntimeError as error:
            raise WeightSyncError(
                f"could not join communicator {communicator.communicator_id} "
                f"within {membership.join_deadline_s:g} s: {error}"
            ) from error

    def close(self) -> None:
        """See `BucketReceiver`.

        The other members notice at once, by their connections. A thread that waits for a bucket
        waits until its deadline, and the other members with it: gloo has no abort that wakes it.
        """
        self._group = self._store = None

    def _take(self, bucket: Bucket, buffer: torch.Tensor, deadline_s: float) -> None:
        group, deadline = self._group, timedelta(seconds=deadline_s)
        if group is None:
            raise WeightSyncError("the communicator was left")
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = bucket.root, 0
        options.timeout = deadline
        try:
            group.broadcast([buffer], options).wait(deadline)
        except RuntimeError as error:
            raise WeightSyncError(
                f"a bucket of {bucket.num_bytes} bytes did not arrive "
                f"within {deadline_s:g} s: {error}"
            ) from error


def _gloo_group(
    store: c10d.Store, rank: int, world_size: int, local_address: str, timeout: timedelta
) -> Any:  # noqa: ANN401 - torch gives the class no public stub
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=local_address)]
    options._timeout = timeout
    return c10d.ProcessGroupGloo(store, rank, world_size, options)


class StorageReceiver(HostReceiver):
    """See `BucketReceiver`: every worker of the engine reads the same file."""

    def __init__(self, membership: Membership, device: torch.device) -> None:
        """Opens the file that the order names. Raises WeightSyncError when it is not there."""
        super().__init__()
        path = membership.communicator.path
        if not path:
            raise WeightSyncError("weights from storage were ordered, but none were fetched")
        try:
            self._file: int | None = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise WeightSyncError(f"the fetched weights in {path} are gone: {error}") from error
        self._next = 0

    def close(self) -> None:
        """See `BucketReceiver`."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _begin(self, incoming: Incoming) -> None:
        self._next = 0

    def _take(self, bucket: Bucket, buffer: torch.Tensor, deadline_s: float) -> None:
        if self._file is None:
            raise WeightSyncError("the fetched weights were closed")
        view = memoryview(buffer.numpy().data)
        while view:
            count = os.preadv(self._file, [view], self._next)
            if not count:
                raise WeightSyncError(f"the fetched weights end at byte {self._next}")
            view, self._next = view[count:], self._next + count
