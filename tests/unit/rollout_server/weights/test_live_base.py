"""Deltas that are applied to live parameters through a copy plan, whole or in shares."""

from collections.abc import Callable, Iterable

import pytest
import torch
from slipstream.protocol.weights.buckets import Bucket, TensorSpec, plan_buckets
from slipstream.protocol.weights.deltas import (
    BLOCK_ELEMENTS,
    num_blocks,
    payload_parts,
    travels_whole,
)
from slipstream.protocol.weights.digests import bucket_digest, bucket_tensor_digests
from slipstream.rollout_server.weights.copy_plan import NotCopied, Replay, record
from slipstream.rollout_server.weights.live_base import (
    LiveBase,
    LiveParts,
    live_parts,
    put_changes,
    whole_digests,
)
from support.references import plain_deltas
from torch import Tensor, nn

CPU = torch.device("cpu")
Named = dict[str, Tensor]
SPECS = [
    TensorSpec("q", "bfloat16", (8, 100)),
    TensorSpec("k", "bfloat16", (4, 100)),
    TensorSpec("down", "bfloat16", (50, 60)),
    TensorSpec("norm", "bfloat16", (101,)),
    TensorSpec("scale", "float32", (33,)),
]
BUCKETS = plan_buckets(SPECS, 7000)


class Worker:
    """One of `size` tensor parallel workers: fused rows, sharded columns, copies of the rest."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.parameters = {
            "qk": nn.Parameter(torch.zeros(12 // size, 100).bfloat16()),
            "down": nn.Parameter(torch.zeros(50, 60 // size).bfloat16()),
            "norm": nn.Parameter(torch.zeros(101).bfloat16()),
            "scale": nn.Parameter(torch.zeros(33)),
        }
        plan = record(self.load, self.parameters, BUCKETS, CPU)
        self.replay = Replay(plan, self.parameters)
        self.live = LiveBase(plan, self.replay, self.parameters, CPU)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies this worker's parts."""
        rows = {"q": (0, 8), "k": (8, 4)}
        for name, tensor in weights:
            if name in rows:
                start, count = rows[name]
                own = count // self._size
                target = self.parameters["qk"].data.narrow(0, start // self._size, own)
                target.copy_(tensor.narrow(0, self._rank * own, own))
            elif name == "down":
                own = 60 // self._size
                self.parameters[name].data.copy_(tensor.narrow(1, self._rank * own, own))
            else:
                self.parameters[name].data.copy_(tensor)

    def bits(self) -> dict[str, list[int]]:
        return {
            name: parameter.data.contiguous().view(torch.int16).flatten().tolist()
            for name, parameter in self.parameters.items()
        }


def weights_of(seed: int) -> Named:
    torch.manual_seed(seed)
    return {spec.name: torch.randn(spec.shape).to(getattr(torch, spec.dtype)) for spec in SPECS}


def packed(bucket: Bucket, weights: Named) -> bytes:
    data = bytearray(bucket.num_bytes)
    for span in bucket.spans:
        raw = bytes(weights[span.tensor.name].contiguous().view(torch.uint8).flatten().numpy())
        data[span.offset_bytes : span.offset_bytes + len(raw)] = raw
    return bytes(data)


def tensor_of(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def digests_of(weights: Named) -> list[bytes]:
    return [bucket_digest(bucket_tensor_digests(b, packed(b, weights))) for b in BUCKETS]


def flip(share: float) -> Callable[[Tensor], None]:
    """Changes a bit of this share of the 16-bit units."""

    def change(tensor: Tensor) -> None:
        units = tensor.view(torch.int16).flatten()
        units[torch.rand(len(units)) < share] ^= 0x4001
        tensor.view(torch.int16).copy_(units.view(tensor.view(torch.int16).shape))

    return change


def set_bits(tensor: Tensor) -> None:
    """-0.0 where there was anything, and NaNs with payloads."""
    units = tensor.view(torch.int16).view(-1)
    units[::11] = -0x8000
    units[3::40] = 0x7FC0
    units[5::40] = -0x003F


def send(workers: list[Worker], old: Named, new: Named) -> tuple[list[bytes], int]:
    """Applies what changed to all workers; returns the digests and the number of payloads."""
    befores = [packed(bucket, old) for bucket in BUCKETS]
    afters = [packed(bucket, new) for bucket in BUCKETS]
    changed = [
        sum(a[n : n + 2] != b[n : n + 2] for n in range(0, len(a), 2))
        for a, b in zip(befores, afters, strict=True)
    ]
    num_payloads = 0
    for worker in workers:
        wires = worker.live.expect(changed)
        worker.live.prepare()
        for place, (wire, bucket) in enumerate(zip(wires, BUCKETS, strict=True)):
            data = afters[place]
            if not travels_whole(bucket, changed[place]):
                data = plain_deltas.encode(befores[place], data)
                num_payloads += 1
            assert len(data) == wire.num_bytes
            worker.live.take(place, tensor_of(data))
    return whole_digests([worker.live.read() for worker in workers]), num_payloads


@pytest.mark.parametrize("size", [1, 2, 4])
def test_live_parameters_become_what_the_loader_would_make_of_the_new_weights(size: int) -> None:
    workers, fresh = ([Worker(rank, size) for rank in range(size)] for _ in range(2))
    old = weights_of(0)
    for worker in workers:
        worker.load(old.items())
    # What is there before the first delta adds up to what was loaded.
    assert whole_digests([w.live.read_unchanged() for w in workers]) == digests_of(old)
    steps = [flip(0.01), flip(0.0), flip(0.1), set_bits, flip(1.0), flip(0.02)]
    for step, change in enumerate(steps):
        new = {name: tensor.clone() for name, tensor in old.items()}
        for tensor in new.values():
            change(tensor)
        found, num_payloads = send(workers, old, new)
        assert num_payloads == (0 if step == 4 else len(BUCKETS) * size)
        assert found == digests_of(new)
        for worker, other in zip(workers, fresh, strict=True):
            other.load(new.items())
            assert worker.bits() == other.bits()
        old = new


def test_a_parameter_that_was_touched_meanwhile_shows_in_the_digests() -> None:
    worker, old = Worker(0, 1), weights_of(0)
    worker.load(old.items())
    worker.parameters["norm"].data[7] += 1
    assert send([worker], old, old)[0] != digests_of(old)


def test_shares_that_do_not_add_up_show_in_the_digests() -> None:
    old = weights_of(0)
    lone = Worker(0, 2)
    lone.load(old.items())
    assert whole_digests([lone.live.read_unchanged()]) != digests_of(old)


def test_another_element_type_than_on_the_wire_takes_no_deltas() -> None:
    parameters = {"a": nn.Parameter(torch.zeros(8))}
    buckets = plan_buckets([TensorSpec("a", "bfloat16", (8,))], 100)

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)

    plan = record(load, parameters, buckets, CPU)
    with pytest.raises(NotCopied, match="a has another element type than its bucket"):
        LiveBase(plan, Replay(plan, parameters), parameters, CPU)


@pytest.mark.parametrize("seed", range(20))
def test_a_payload_of_any_bytes_writes_nothing_outside_its_bucket(seed: int) -> None:
    """After an abort a receive buffer holds anything."""
    (bucket,) = plan_buckets([TensorSpec("a", "bfloat16", (1000,))], 4000)
    size = num_blocks(bucket) * BLOCK_ELEMENTS
    memory = torch.zeros(size + 2 * BLOCK_ELEMENTS, dtype=torch.int16)
    torch.manual_seed(seed)
    changed = 200
    payload = torch.randint(0, 256, (payload_parts(bucket, changed)[2],)).to(torch.uint8)
    put_changes(payload, bucket, changed, memory[BLOCK_ELEMENTS : BLOCK_ELEMENTS + size])
    assert not memory[:BLOCK_ELEMENTS].any()
    assert not memory[-BLOCK_ELEMENTS:].any()


@pytest.mark.parametrize("seed", range(20))
def test_any_payload_writes_nothing_outside_of_the_tensors_where_they_lie(seed: int) -> None:
    specs = [TensorSpec("a", "bfloat16", (96,)), TensorSpec("b", "bfloat16", (1001,))]
    (bucket,) = plan_buckets(specs, 4000)
    memory = torch.zeros(1500, dtype=torch.int16)
    views = [memory[200:296], memory[304:1305]]
    torch.manual_seed(seed)
    changed = 200
    payload = torch.randint(0, 256, (payload_parts(bucket, changed)[2],)).to(torch.uint8)
    LiveParts(bucket, views, None).put(payload, bucket, changed, 0)
    for outside in (memory[:200], memory[296:304], memory[1305:]):
        assert not outside.any()


@pytest.mark.parametrize("size", [1, 2])
def test_whole_tensors_are_changed_where_they_lie(size: int) -> None:
    """Rows and columns that two workers share are not."""
    worker = Worker(0, size)
    plan = record(worker.load, worker.parameters, BUCKETS, CPU)
    for place, bucket in enumerate(BUCKETS):
        names = {span.tensor.name for span in bucket.spans}
        is_shared = size > 1 and bool(names & {"q", "k", "down"})
        assert (live_parts(plan, place, worker.parameters, None) is None) == is_shared
