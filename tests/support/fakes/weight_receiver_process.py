"""A worker that takes part in publishes and only digests what it gets: no vLLM, no model.

Its argument is the receiver. When it is ready it prints a line; then it reads one command in JSON
from each line of its input and prints one answer in JSON. Over NCCL and ipc it uses the first GPU
that it sees. A command with `die_at` ends it by SIGKILL while that bucket travels.
"""

import json
import os
import signal
import sys
import time
from typing import Any, Protocol

from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.buckets import Bucket, layout_from_pb
from slipstream.protocol.weights.digests import bucket_digest
from slipstream.v1 import weights_pb2

JOIN_DEADLINE_S = 30.0
BUCKET_DEADLINE_S = 5.0


class Receiver(Protocol):
    def receive(self, buckets: list[Bucket], die_at: int | None) -> list[bytes]: ...

    def close(self) -> None: ...


class Gloo:
    @staticmethod
    def load() -> None:
        import torch.distributed  # noqa: F401

    def __init__(self, where: weights_pb2.Communicator, rank: int) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        store = dist.TCPStore(
            where.store_host, where.store_port, is_master=False, wait_for_workers=False
        )
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore(where.communicator_id, store),
            rank,
            where.world_size,
            timedelta(seconds=BUCKET_DEADLINE_S),
        )

    def receive(self, buckets: list[Bucket], die_at: int | None) -> list[bytes]:
        import torch
        from slipstream.protocol.weights.digests import HostDigests

        digests = HostDigests(buckets)
        for place, bucket in enumerate(buckets):
            if place == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            data = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            try:
                self._group.broadcast(data, bucket.root).wait()
            except RuntimeError as error:
                raise WeightSyncError(f"bucket {place}: {error}") from error
            digests.add(place, data.data_ptr())
        return [bucket_digest(found) for found in digests.read()]

    def close(self) -> None:
        del self._group


class Own:
    """One of the rollout server's own transports, on the first GPU if there is one."""

    name: str

    @classmethod
    def load(cls) -> None:
        import torch

        cls._kind()
        torch.zeros(1, device=_device())

    def __init__(self, where: weights_pb2.Communicator, rank: int) -> None:
        from slipstream.rollout_server.weights.bucket_receiver import Seat

        self._receiver = self._kind()(Seat(where, rank, JOIN_DEADLINE_S), _device())

    def receive(self, buckets: list[Bucket], die_at: int | None) -> list[bytes]:
        from slipstream.rollout_server.weights.bucket_receiver import Incoming

        incoming = Incoming(tuple(buckets), BUCKET_DEADLINE_S, own_buffers=False)
        for place, _ in enumerate(self._receiver.receive(incoming)):
            if place == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        found: list[bytes] = self._receiver.digests()
        self.wire_s = self._receiver.take_wire().seconds
        return found

    def close(self) -> None:
        self._receiver.close()

    @classmethod
    def _kind(cls) -> Any:
        from slipstream.rollout_server.vllm.weight_receiver import TRANSPORTS

        return TRANSPORTS[cls.name]


class Nccl(Own):
    name = "nccl"


class Ipc(Own):
    name = "ipc"


def _device() -> Any:
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def main() -> None:
    from slipstream.protocol.weights.nccl_group import set_nccl_environment

    set_nccl_environment(os.environ)
    kind = {"gloo": Gloo, "nccl": Nccl, "ipc": Ipc}[sys.argv[1]]
    kind.load()
    print(json.dumps({"ready": True}), flush=True)
    receiver: Receiver | None = None
    for line in sys.stdin:
        command = json.loads(line)
        where = weights_pb2.Communicator.FromString(bytes.fromhex(command["communicator"]))
        layout = weights_pb2.WeightLayout.FromString(bytes.fromhex(command["layout"]))
        answer: dict[str, object] = {}
        started_s = time.monotonic()
        try:
            if command["is_new"]:
                if receiver is not None:
                    receiver.close()
                receiver = kind(where, command["rank"])
                answer["joined_s"] = round(time.monotonic() - started_s, 4)
                started_s = time.monotonic()
            assert receiver is not None
            digests = receiver.receive(layout_from_pb(layout), command["die_at"])
            answer["digests"] = [digest.hex() for digest in digests]
            if isinstance(receiver, Own):
                answer["wire_s"] = receiver.wire_s
        except (WeightSyncError, RuntimeError) as error:
            answer["error"] = str(error)
            if receiver is not None:
                receiver.close()
                receiver = None
        answer["seconds"] = round(time.monotonic() - started_s, 4)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
