"""What the kernels of changes find, write and put on a GPU, beside what a CPU does."""

import pytest
import torch
from slipstream.learner.trainer.weights.delta_base import DeltaBase
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.protocol.weights.deltas import payload_parts, travels_whole
from slipstream.protocol.weights.digests import HostDigests
from slipstream.rollout_server.weights.bucket_receiver import open_digests
from slipstream.rollout_server.weights.live_base import LiveParts

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
SPECS = [
    TensorSpec("a", "bfloat16", (333, 1001)),
    TensorSpec("b", "float32", (77,)),
    TensorSpec("c", "bfloat16", (1 << 22,)),
    TensorSpec("d", "bfloat16", (5,)),
]
BUCKETS = tuple(plan_buckets(SPECS, 1 << 20))
# Shares of changed elements: each sixteenth and less is encoded early.
SHARES = (0.01, 0.0, 0.03, 0.3, 0.001, 1.0, 0.02)


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda", 0)


def bucket_bytes(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (bucket.num_bytes,), dtype=torch.uint8, generator=generator)
        for bucket in BUCKETS
    ]


def changed_bytes(data: torch.Tensor, share: float) -> torch.Tensor:
    units = data.clone().view(torch.int16)
    units[torch.rand(len(units)) < share] ^= 0x2101
    return units.view(torch.uint8)


def test_payloads_are_those_of_a_cpu(gpu: torch.device) -> None:
    own = [True] * len(BUCKETS)
    bases = [DeltaBase(BUCKETS, own, d, on_host=False, encodes_early=True) for d in (CPU, gpu)]
    devices, held = (CPU, gpu), bucket_bytes(0)
    for base, device in zip(bases, devices, strict=True):
        for place, data in enumerate(held):
            base.keep(place, data.to(device, copy=True))
        base.settle(base.counts(), sent=[b"first"])
    num_early = 0
    for step, share in enumerate(SHARES):
        torch.manual_seed(step)
        held = [changed_bytes(data, share) for data in held]
        found: list[list[torch.Tensor]] = []
        for base, device in zip(bases, devices, strict=True):
            there = [data.to(device, copy=True) for data in held]
            for place, data in enumerate(there):
                base.count(place, data)
            counts = base.counts()
            base.settle(counts)
            payloads = []
            for place, data in enumerate(there):
                if base.has_early(place):
                    payloads.append(base.take_early(place).cpu())
                    num_early += 1
                elif travels_whole(BUCKETS[place], counts[place]):
                    base.keep(place, data)
                else:
                    base.encode(place, data)
                    end = payload_parts(BUCKETS[place], counts[place])[2]
                    payloads.append(data[:end].cpu())
            base.settle(counts, sent=[b"%d" % step])
            found.append([torch.tensor(counts), *payloads])
        assert len(found[0]) == len(found[1])
        for mine, other in zip(*found, strict=True):
            assert torch.equal(mine, other)
    assert num_early > 4 * len(BUCKETS)


@pytest.mark.parametrize("kind", ["encoded", "any bytes"])
def test_live_parts_become_those_of_a_cpu(gpu: torch.device, kind: str) -> None:
    from slipstream.protocol.weights.cuda_changes import CudaChanges

    bucket = BUCKETS[0]
    torch.manual_seed(3)
    (old, *_), room = bucket_bytes(1), 64
    new = changed_bytes(old, 0.02)
    base = DeltaBase((bucket,), [True], CPU, on_host=False, encodes_early=True)
    base.keep(0, old.clone())
    base.settle([0], sent=[b"first"])
    base.count(0, new)
    (changed,) = base.counts()
    base.settle([changed])
    payload = base.take_early(0)
    if kind == "any bytes":
        payload = torch.randint(0, 256, payload.shape, dtype=torch.uint8)
    with torch.cuda.device(gpu):
        kernels = CudaChanges()
    found = []
    for device, its_kernels in ((CPU, None), (gpu, kernels)):
        memory, views = [], []
        for span in bucket.spans:
            size = span.tensor.num_bytes
            part = torch.zeros(size + 2 * room, dtype=torch.uint8, device=device)
            part[room : room + size] = old[span.offset_bytes : span.offset_bytes + size]
            memory.append(part)
            views.append(part[room : room + size].view(torch.int16))
        parts = LiveParts(bucket, views, its_kernels)
        stream = torch.cuda.current_stream(gpu).cuda_stream if its_kernels else 0
        parts.put(payload.to(device), bucket, changed, stream)
        digests = open_digests((parts.bucket,), device)
        digests.add(0, parts.pointer, stream)
        found.append((digests.read(stream), [part.cpu() for part in memory]))
        assert all(not part[:room].any() and not part[-room:].any() for part in memory)
    if kind == "encoded":
        expected = HostDigests((bucket,))
        expected.add(0, new.data_ptr())
        assert found[0][0] == found[1][0] == expected.read()
        for mine, other in zip(found[0][1], found[1][1], strict=True):
            assert torch.equal(mine, other)
