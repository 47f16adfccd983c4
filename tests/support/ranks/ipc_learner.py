"""The learner's end of an ipc communicator as a program that is told what to do line by line.

`python ipc_learner.py [DEVICE [FACTOR]]`: its buckets are FACTOR times as large.
"""

import json
import sys

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.core.settings.sections import WeightsSection
from slipstream.learner.trainer.weights.bucket_senders import IpcSender
from slipstream.protocol.weights.buckets import Bucket, TensorSpan, TensorSpec
from slipstream.v1 import weights_pb2


def bucket(name: str, num_bytes: int) -> Bucket:
    return Bucket(
        (TensorSpan(TensorSpec(name, "float32", (num_bytes // 4,)), 0),), num_bytes
    )


# An odd number of them: the second update begins with the first buffer again.
BUCKETS = tuple(
    bucket(f"w{n}", size) for n, size in enumerate((4096, 65536, 65536, 512, 8192))
)


def enlarged(factor: int) -> tuple[Bucket, ...]:
    return tuple(
        bucket(template.spans[0].tensor.name, factor * template.num_bytes)
        for template in BUCKETS
    )


def content(seed: int, place: int, factor: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + place)
    size = BUCKETS[place].num_bytes
    small = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return small.repeat(factor)


def main() -> None:
    """`announce NAME WORKERS`, `connect`, `send SEED`: one line of answer each."""
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    factor = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    buckets = enlarged(factor)
    largest = max(bucket.num_bytes for bucket in buckets)
    weights = WeightsSection(join_deadline_s=30.0, bucket_deadline_s=20.0)
    sender = IpcSender(weights, device, num_bytes=largest)
    where = weights_pb2.Communicator()
    # There is one lane, which is filled again as soon as `send` has returned.
    lane = torch.zeros(largest, dtype=torch.uint8, device=device)
    for line in sys.stdin:
        word, *arguments = line.split()
        try:
            if word == "announce":
                world_size = 1 + int(arguments[1])
                where = sender.announce(
                    arguments[0], num_senders=1, world_size=world_size
                )
                names = ("communicator_id", "store_host", "world_size")
                print(
                    json.dumps({name: getattr(where, name) for name in names}),
                    flush=True,
                )
            elif word == "connect":
                sender.connect(where, 0)
                print("connected", flush=True)
            else:
                contents = [
                    content(int(arguments[0]), place, factor).to(device)
                    for place in range(len(buckets))
                ]
                for spec, data in zip(buckets, contents, strict=True):
                    lane[: spec.num_bytes] = data
                    sender.send(spec, lane[: spec.num_bytes])
                sender.finish()
                print("sent", flush=True)
        except WeightSyncError as error:
            print(error, flush=True)


if __name__ == "__main__":
    main()
