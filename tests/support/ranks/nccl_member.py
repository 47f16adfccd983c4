"""One member of an NCCL communicator, on the first GPU that it sees; no torch.

Arguments: a folder where members meet, rank, world size, and what it does: "broadcast", "survive"
"victim", "leave" or "left".
"""

import json
import os
import sys
import time
from pathlib import Path

from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.protocol.weights.digests import CudaDigests
from slipstream.protocol.weights.nccl_group import (
    NcclGroup,
    make_unique_id,
    set_nccl_environment,
    use_device,
)

BUCKET_BYTES = 256 << 20


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def meet(folder: Path, name: str, rank: int) -> bytes:
    """The unique id, which rank 0 makes."""
    path = folder / name
    if rank == 0:
        path.with_suffix(".partial").write_bytes(make_unique_id())
        path.with_suffix(".partial").rename(path)
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.005)
    return path.read_bytes()


def join(
    folder: Path, name: str, rank: int, world_size: int, deadline_s: float = 60.0
) -> NcclGroup:
    unique_id = meet(folder, name, rank)
    return NcclGroup.join(
        0, unique_id, rank=rank, world_size=world_size, deadline_s=deadline_s
    )


def broadcast_all(group: NcclGroup, rank: int, world_size: int) -> None:
    """Every rank is the root of some buckets; two memories in turn."""
    import cupy

    tensors = [
        TensorSpec(
            f"t{n}", "bfloat16", (BUCKET_BYTES // 2,), sender=n % min(world_size, 2)
        )
        for n in range(8)
    ]
    buckets = plan_buckets(tensors, BUCKET_BYTES)
    memory = [cupy.zeros(BUCKET_BYTES, dtype=cupy.uint8) for _ in range(2)]
    digests = CudaDigests(buckets)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    for repeat in range(4):
        started = time.monotonic()
        for place, bucket in enumerate(buckets):
            target = memory[place % 2]
            if repeat == 0 and bucket.root == rank:
                with stream:
                    target[...] = (cupy.arange(BUCKET_BYTES) * (place + 3)).astype(
                        cupy.uint8
                    )
            group.broadcast(
                target.data.ptr,
                bucket.num_bytes,
                bucket.root,
                stream.ptr,
                deadline_s=10.0,
            )
            if repeat == 0:
                digests.add(place, target.data.ptr, stream.ptr)
        group.wait()
        wall_s = time.monotonic() - started
        wire = group.take_wire()
        if repeat == 0:
            bucket_digests = digests.read(stream.ptr)
            say(
                digests=[
                    digest.hex() for of_bucket in bucket_digests for digest in of_bucket
                ]
            )
    total = 8 * BUCKET_BYTES
    say(
        gb_per_s=round(total / wall_s / 1e9, 1),
        wire_gb_per_s=round(wire.num_bytes / wire.seconds / 1e9, 1),
    )


def survive(group: NcclGroup, folder: Path, rank: int, world_size: int) -> None:
    """Broadcasts until one is not done; then those who are left meet again."""
    import cupy

    memory = cupy.zeros(BUCKET_BYTES, dtype=cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    last_s = time.monotonic()
    try:
        for count in range(1_000_000):
            group.broadcast(
                memory.data.ptr, BUCKET_BYTES, 0, stream.ptr, deadline_s=1.0
            )
            group.wait()
            last_s = time.monotonic()
            if count == 50 and rank == 0:
                (folder / "broadcasting").touch()
    except WeightSyncError as error:
        stream.synchronize()
        released_s = time.monotonic() - last_s
        started = time.monotonic()
        again = join(folder, "second", rank, world_size - 1)
        again.broadcast(memory.data.ptr, BUCKET_BYTES, 0, stream.ptr, deadline_s=5.0)
        again.wait()
        rebuilt_s = time.monotonic() - started
        again.abort()
        say(
            error=str(error),
            released_s=round(released_s, 3),
            rebuilt_s=round(rebuilt_s, 3),
        )


def leave(folder: Path, rank: int, world_size: int) -> None:
    """Meets the others and is gone before their first broadcast."""
    from cupy.cuda import nccl

    nccl.NcclCommunicator(world_size, meet(folder, "first", rank), rank)
    os._exit(0)


def be_left(folder: Path, rank: int, world_size: int) -> None:
    """What such a member costs: the deadline, and nothing on the device."""
    import cupy

    started = time.monotonic()
    error = ""
    try:
        join(folder, "first", rank, world_size, deadline_s=20.0)
    except WeightSyncError as found:
        error = str(found)
    joined_s = time.monotonic() - started
    # All of it: also the kernel of the broadcast.
    cupy.cuda.Device(0).synchronize()
    idle_s = time.monotonic() - started - joined_s
    again = join(folder, "second", rank, world_size - 1)
    again.abort()
    say(error=error, joined_s=round(joined_s, 3), idle_s=round(idle_s, 3))


def main() -> None:
    folder, rank, world_size, mode = (
        Path(sys.argv[1]),
        *map(int, sys.argv[2:4]),
        sys.argv[4],
    )
    set_nccl_environment(os.environ)
    use_device(0)
    if mode in ("leave", "left"):
        (leave if mode == "leave" else be_left)(folder, rank, world_size)
        return
    started = time.monotonic()
    group = join(folder, "first", rank, world_size)
    if mode == "broadcast":
        say(joined_s=round(time.monotonic() - started, 3))
        broadcast_all(group, rank, world_size)
    else:
        survive(group, folder, rank, world_size)
    group.abort()


if __name__ == "__main__":
    main()
