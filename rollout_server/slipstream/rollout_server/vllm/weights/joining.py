"""The transports by name, and how a worker joins a communicator while its engine computes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.rollout_server.vllm.weights.nccl_receiver import NcclReceiver
from slipstream.rollout_server.weights.bucket_receiver import BucketReceiver, Seat
from slipstream.rollout_server.weights.gloo_receiver import GlooReceiver
from slipstream.rollout_server.weights.ipc_receiver import IpcReceiver
from slipstream.rollout_server.weights.storage_receiver import StorageReceiver

TRANSPORTS: dict[str, Callable[[Seat, torch.device], BucketReceiver]] = {
    "gloo": GlooReceiver,
    "ipc": IpcReceiver,
    "nccl": NcclReceiver,
    "storage": StorageReceiver,
}


class Joining:
    """Joins a communicator on a thread: the engine computes meanwhile."""

    def __init__(self, membership: Seat, device: torch.device) -> None:
        self.communicator_id = membership.communicator.communicator_id
        self._lock = threading.Lock()
        self._closed = False
        self._receiver: BucketReceiver | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._join, args=(membership, device), name="weight-join", daemon=True
        )
        self._thread.start()

    def result(self) -> BucketReceiver | None:
        """Returns the receiver, or None while it joins; WeightSyncError when it could not join."""
        with self._lock:
            if self._error is not None:
                raise WeightSyncError(str(self._error)) from self._error
            return self._receiver

    def close(self) -> None:
        """Leaves the communicator, at once or as soon as the thread has joined it."""
        with self._lock:
            self._closed = True
            receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def _join(self, membership: Seat, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            receiver = TRANSPORTS[membership.communicator.transport](membership, device)
        except Exception as error:  # noqa: BLE001 - raised by `result`, in the worker's thread
            with self._lock:
                self._error = error
            return
        with self._lock:
            if not self._closed:
                self._receiver = receiver
                return
        receiver.close()
