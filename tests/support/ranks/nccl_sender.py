"""The learner's side of a weight transfer over NCCL: rank 0, on the first GPU that it sees.

Reads commands from stdin, one JSON object a line, and answers each with one line: {"listen": true},
{"join": [world size, deadline]}, {"load": [file, bucket bytes]}, {"send": [deadline, most buckets
or null]}.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from slipstream.core.types import PolicyVersion
from slipstream.protocol.codec import version_to_pb
from slipstream.protocol.weights.buckets import Bucket, TensorSpec, plan_buckets
from slipstream.protocol.weights.digests import bucket_digest
from slipstream.rollout_server.weights.copy_plan import cut
from slipstream.v1 import weights_pb2


class NcclSender:
    """The same calls as `GlooSender`; the work is done by a process with a GPU of its own."""

    def __init__(
        self,
        communicator_id: str,
        *,
        gpu: str = "0",
        num_workers: int = 1,
        deadline_s: float = 20.0,
    ) -> None:
        self._deadline_s = deadline_s
        self._joined = False
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
        )
        self.communicator = weights_pb2.Communicator(
            communicator_id=communicator_id,
            transport="nccl",
            world_size=1 + num_workers,
            num_senders=1,
            unique_id=bytes.fromhex(self._ask(listen=True)),
        )

    def order(self, publish_id: str, step: int) -> weights_pb2.PublishOrder:
        return weights_pb2.PublishOrder(
            publish_id=publish_id,
            version=version_to_pb(PolicyVersion(0, step)),
            communicator=self.communicator,
            new_communicator=not self._joined,
            bucket_deadline_s=self._deadline_s,
            join_deadline_s=60.0,
        )

    def join(self) -> None:
        self._ask(join=[self.communicator.world_size, 60.0])
        self._joined = True

    def send(
        self,
        layout: weights_pb2.WeightLayout,
        tensors: Mapping[str, torch.Tensor],
        *,
        max_buckets: int | None = None,
    ) -> list[bytes]:
        """Joins if need be and sends what was loaded; digests of the buckets."""
        if not self._joined:
            self.join()
        return [
            bytes.fromhex(digest)
            for digest in self._ask(send=[self._deadline_s, max_buckets])
        ]

    def load(self, file: Path, bucket_bytes: int) -> None:
        """Fills buckets with what `file` holds."""
        self._ask(load=[str(file), bucket_bytes])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, **command: object) -> Any:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def serve() -> None:
    """The process: answers until stdin ends."""
    from safetensors.torch import load_file
    from slipstream.protocol.weights.digests import CudaDigests
    from slipstream.protocol.weights.nccl_group import (
        NcclGroup,
        make_unique_id,
        set_nccl_environment,
        use_device,
    )

    set_nccl_environment(os.environ)
    torch.cuda.set_device(0)
    use_device(0)
    stream = torch.cuda.Stream()
    unique_id = b""
    buckets = []
    rooms = []
    digests = None
    answer: object = None
    for line in sys.stdin:
        command = json.loads(line)
        if "listen" in command:
            unique_id = make_unique_id()
            answer = unique_id.hex()
        elif "join" in command:
            world_size, deadline_s = command["join"]
            group = NcclGroup.join(
                0, unique_id, rank=0, world_size=world_size, deadline_s=deadline_s
            )
            answer = True
        elif "load" in command:
            path, bucket_bytes = command["load"]
            # Every bucket has memory of its own: only the receiver is to be measured.
            buckets, rooms = _fill(load_file(path, device="cuda"), bucket_bytes)
            digests = CudaDigests(buckets)
            torch.cuda.synchronize()
            answer = True
        else:
            deadline_s, max_buckets = command["send"]
            started = time.perf_counter()
            for place, (bucket, room) in enumerate(zip(buckets, rooms, strict=True)):
                if max_buckets is not None and place >= max_buckets:
                    break
                pointer = room.data_ptr()
                handle = stream.cuda_stream
                group.broadcast(
                    pointer, bucket.num_bytes, 0, handle, deadline_s=deadline_s
                )
                digests.add(place, pointer, handle)
            group.wait()
            bucket_digests = digests.read(stream.cuda_stream)
            wire = group.take_wire()
            wall_s = time.perf_counter() - started
            print(
                f"sent in {wall_s:.4f} s, "
                f"{wire.num_bytes} bytes behind the first bucket in {wire.seconds:.4f} s",
                file=sys.stderr,
                flush=True,
            )
            answer = [bucket_digest(part).hex() for part in bucket_digests]
        print(json.dumps(answer), flush=True)


def _fill(
    weights: Mapping[str, torch.Tensor], bucket_bytes: int
) -> tuple[list[Bucket], list[torch.Tensor]]:
    tensors = [
        TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for n, t in weights.items()
    ]
    buckets = plan_buckets(tensors, bucket_bytes)
    rooms = [
        torch.zeros(b.num_bytes, dtype=torch.uint8, device="cuda") for b in buckets
    ]
    for bucket, room in zip(buckets, rooms, strict=True):
        for name, place in cut(room, bucket):
            place.copy_(weights[name])
    return buckets, rooms


if __name__ == "__main__":
    serve()
