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
from typing import Any

from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.buckets import Bucket, layout_from_pb
from slipstream.v1 import weights_pb2

JOIN_DEADLINE_S = 30.0
BUCKET_DEADLINE_S = 5.0


def kind_of(name: str) -> Any:
    """One of the rollout server's own transports."""
    if name == "nccl":
        from slipstream.rollout_server.vllm.nccl_receiver import NcclReceiver

        return NcclReceiver
    from slipstream.rollout_server.weights.bucket_receiver import GlooReceiver, IpcReceiver

    return {"gloo": GlooReceiver, "ipc": IpcReceiver}[name]


def received(receiver: Any, buckets: list[Bucket], die_at: int | None) -> list[bytes]:
    """The digests of one update."""
    from slipstream.rollout_server.weights.bucket_receiver import Incoming

    incoming = Incoming(tuple(buckets), BUCKET_DEADLINE_S, own_buffers=False)
    for place, _ in enumerate(receiver.receive(incoming)):
        if place == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    digests: list[bytes] = receiver.digests()
    return digests


def _device() -> Any:
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def main() -> None:
    from slipstream.protocol.weights.nccl_group import set_nccl_environment

    set_nccl_environment(os.environ)
    import torch
    from slipstream.rollout_server.weights.bucket_receiver import Seat

    kind = kind_of(sys.argv[1])
    # Starts CUDA, if it is there.
    torch.zeros(1, device=_device())
    print(json.dumps({"ready": True}), flush=True)
    receiver: Any = None
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
                receiver = kind(Seat(where, command["rank"], JOIN_DEADLINE_S), _device())
                answer["joined_s"] = round(time.monotonic() - started_s, 4)
                started_s = time.monotonic()
            assert receiver is not None
            digests = received(receiver, layout_from_pb(layout), command["die_at"])
            answer["digests"] = [digest.hex() for digest in digests]
            answer["wire_s"] = receiver.take_wire().seconds
        except (WeightSyncError, RuntimeError) as error:
            answer["error"] = str(error)
            if receiver is not None:
                receiver.close()
                receiver = None
        answer["seconds"] = round(time.monotonic() - started_s, 4)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
