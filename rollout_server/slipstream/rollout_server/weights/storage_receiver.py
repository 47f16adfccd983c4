"""The storage transport: buckets lie in a file that the server has fetched them into."""

from __future__ import annotations

import os

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.buckets import Bucket
from slipstream.rollout_server.weights.bucket_receiver import Incoming, Seat
from slipstream.rollout_server.weights.gloo_receiver import HostReceiver


class StorageReceiver(HostReceiver):
    """See `BucketReceiver`: every worker of the engine reads the same file."""

    def __init__(self, membership: Seat, device: torch.device) -> None:
        """Opens the file that the order names; WeightSyncError when it is not there."""
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
