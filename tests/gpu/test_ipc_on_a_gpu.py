"""Weights by CUDA IPC: a sender and receivers in processes of their own, on one GPU or on two."""

import json
import subprocess
import sys
import threading
import time

import pytest
import torch
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.digests import HostDigests, bucket_digest
from slipstream.rollout_server.weights.bucket_receiver import Incoming, IpcReceiver
from slipstream.v1 import weights_pb2
from support.ranks import ipc_learner
from support.rigs.gpu_records import note

pytestmark = pytest.mark.timeout(300)
# Buckets of at most 64 MiB.
FACTOR = 1024
BUCKETS = ipc_learner.enlarged(FACTOR)
DEADLINE_S = 20.0


class Learner:
    """The sender's process; it may write through another GPU than the receivers do."""

    def __init__(self, gpu: int) -> None:
        arguments = [sys.executable, ipc_learner.__file__, f"cuda:{gpu}", str(FACTOR)]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


def join(
    learner: Learner, name: str, workers: int, device: torch.device
) -> list[IpcReceiver]:
    learner.tell(f"announce {name} {workers}")
    where = weights_pb2.Communicator(transport="ipc", **json.loads(learner.line()))
    learner.tell("connect")
    receivers: dict[int, IpcReceiver] = {}

    def open_one(rank: int) -> None:
        torch.cuda.set_device(device)
        receivers[rank] = IpcReceiver(where, rank, 60.0, device)

    threads = [threading.Thread(target=open_one, args=(1 + n,)) for n in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert learner.line() == "connected"
    return [receivers[rank] for rank in sorted(receivers)]


def expected_digests(seed: int) -> list[bytes]:
    digests = HostDigests(BUCKETS)
    for place in range(len(BUCKETS)):
        data = ipc_learner.content(seed, place, FACTOR)
        digests.add(place, data.data_ptr())
    return [bucket_digest(bucket_digests) for bucket_digests in digests.read()]


@pytest.mark.parametrize("gpu", [0, 1])
def test_what_is_read_is_what_was_sent(gpu: int) -> None:
    if gpu >= torch.cuda.device_count():
        pytest.skip("one GPU only")
    device = torch.device("cuda", 0)
    learner = Learner(gpu)
    torch.cuda.set_device(device)
    started_s = time.perf_counter()
    (transport,) = join(learner, "gpu", 1, device)
    note("ipc", test="join", gpu=gpu, seconds=round(time.perf_counter() - started_s, 3))
    copies = [
        torch.empty(b.num_bytes, dtype=torch.uint8, device=device) for b in BUCKETS
    ]
    for seed in range(1, 6):
        is_first = seed == 1
        incoming = Incoming(BUCKETS, DEADLINE_S, is_first)
        transport.prepare(incoming)
        learner.tell(f"send {seed}")
        buckets = transport.receive(incoming)
        first = next(buckets)
        started_s = time.perf_counter()
        copies[0].copy_(first)
        for place, data in enumerate(buckets, start=1):
            copies[place].copy_(data)
        got = transport.digests()
        note(
            "ipc",
            test="pass",
            gpu=gpu,
            seed=seed,
            megabytes=sum(b.num_bytes for b in BUCKETS[1:]) / 1e6,
            milliseconds=round(1e3 * (time.perf_counter() - started_s), 3),
        )
        assert learner.line() == "sent"
        assert got == expected_digests(seed)
        for place, copy in enumerate(copies):
            assert torch.equal(copy.cpu(), ipc_learner.content(seed, place, FACTOR))
    transport.close()
    learner.end()


def test_a_learner_that_is_killed_leaves_receivers_alive() -> None:
    device = torch.device("cuda", 0)
    learner = Learner(0)
    torch.cuda.set_device(device)
    first, second = join(learner, "dies", 2, device)
    learner.tell("send 7")
    incoming = Incoming(BUCKETS, DEADLINE_S, own_buffers=False)
    buckets = first.receive(incoming)
    next(buckets)
    learner.end()
    started_s = time.perf_counter()
    with pytest.raises(WeightSyncError, match="is gone"):
        list(buckets)
    with pytest.raises(WeightSyncError, match="is gone"):
        list(second.receive(incoming))
    note("ipc", test="killed", seconds=round(time.perf_counter() - started_s, 3))
    first.close()
    second.close()
    # The GPU goes on, and a new communicator works.
    again = Learner(0)
    (transport,) = join(again, "again", 1, device)
    again.tell("send 8")
    for _ in transport.receive(incoming):
        pass
    assert transport.digests() == expected_digests(8)
    transport.close()
    again.end()
