"""The two ends of the wire, without a trainer or an engine around them; `wire.py` starts them.

- `sender`: the trainer's stream of buckets and its sender, over parameters that are fused as
  Megatron's are.
- `receiver`: a rollout server's transport, digests and copies, into parameters that are fused as
  vLLM's are.

Each reads one JSON object a line from its standard input and answers each with one line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from slipstream.core.settings.sections import OffloadSection, WeightsSection
from slipstream.extensions.offload.trainer import HostMemory
from slipstream.learner.trainer.weights.bucket_fill import PlannedFilling
from slipstream.learner.trainer.weights.bucket_senders import BucketSenders
from slipstream.learner.trainer.weights.export_plan import Piece
from slipstream.learner.trainer.weights.weight_stream import WeightStream, bucket_bytes
from slipstream.protocol.weights.buckets import layout_from_pb, layout_to_pb
from slipstream.protocol.weights.nccl_group import NcclGroup, Wire, set_nccl_environment
from slipstream.rollout_server.vllm.weight_receiver import TRANSPORTS
from slipstream.rollout_server.weights.bucket_receiver import Incoming, Seat
from slipstream.rollout_server.weights.copy_plan import Copy, CopyPlan, Replay, View
from slipstream.v1 import weights_pb2
from torch import Tensor

from benchmarks.common.shapes import SHAPES, Shape
from benchmarks.learner.loops import synchronize
from benchmarks.weights.broadcast_peers import Message, Pipe

DTYPE = torch.bfloat16
# Size of a trained model's weights: it decides how many of them a step changes.
STD = 0.02
LIMITS = {"bucket_deadline_s": 20.0, "join_deadline_s": 60.0}


class End(Protocol):
    """The commands that both ends take."""

    def announce(self, message: Message) -> Message:
        """Returns communicator and layout; for the sender alone."""
        ...

    def join(self, message: Message) -> Message:
        """Joins the communicator."""
        ...

    def prepare(self, message: Message) -> Message:
        """Does the work before a publish; returns its times."""
        ...

    def publish(self, message: Message) -> Message:
        """Sends or receives all weights once; returns times and digests."""
        ...

    def sums(self, message: Message) -> Message:
        """Returns a sum over the bits of every tensor of the checkpoint, by name."""
        ...


class LoneRanks:
    """A trainer of one rank."""

    rank, is_main = 0, True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns this rank's bytes alone."""
        return [data]

    def has_first_copy(self, *, of_experts: bool) -> bool:
        """Returns True, since there is no other rank."""
        return True


class LonePolicy:
    """The part of a policy that a stream of its weights needs."""

    def __init__(self, device: torch.device) -> None:
        self.ranks: Any = LoneRanks(device)
        self.memory = HostMemory(OffloadSection())

    def gather_parameters(self) -> None:
        """Does nothing: the parameters are whole."""


class Sender:
    """See `End`."""

    def __init__(self, shape: Shape, device: torch.device, bucket_mib: int) -> None:
        self._device = device
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._tensors = dict(_megatron_parts(shape, device))
        pieces = [
            Piece(name, part, tuple(sizes), None, dist.group.WORLD, is_expert=False)
            for (name, part), (_, sizes) in zip(self._tensors.items(), shape.tensors(), strict=True)
        ]
        policy: Any = LonePolicy(device)
        filling = PlannedFilling(policy, str(DTYPE).removeprefix("torch."), pieces)
        weights = WeightsSection(bucket_mib=bucket_mib, **LIMITS)
        size = bucket_bytes(weights, filling.tensors)
        self._stream = WeightStream(policy, filling, bucket_bytes=size)
        senders = BucketSenders(
            weights, device, largest_bucket=self._stream.largest_bucket, host="127.0.0.1"
        )
        self._sender: Any = senders.for_transport("nccl" if device.type == "cuda" else "gloo")

    def announce(self, message: Message) -> Message:
        """See `End`."""
        announced = self._sender.announce("wire", num_senders=1, world_size=message["world_size"])
        self._announced = announced
        stream = self._stream
        layout = layout_to_pb(stream.tensors, stream.bucket_bytes).SerializeToString().hex()
        facts = {"num_bytes": stream.num_bytes, "num_buckets": len(stream.buckets)}
        return {"communicator": announced.SerializeToString().hex(), "layout": layout, **facts}

    def join(self, message: Message) -> Message:
        """See `End`."""
        self._sender.connect(self._announced, 0)
        self.group = self._sender._group
        return {}

    def prepare(self, message: Message) -> Message:
        """See `End`: digests all weights and fills the first buckets, as after a step."""
        marks = [time.perf_counter()]
        for part in (self._stream.run, self._stream.fill_ahead):
            part()
            synchronize(self._device)
            marks.append(time.perf_counter())
        return {"digests_s": marks[1] - marks[0], "ahead_s": marks[2] - marks[1]}

    def publish(self, message: Message) -> Message:
        """See `End`."""
        started = time.perf_counter()
        digests = self._stream.run(lambda _, bucket, data: self._sender.send(bucket, data))
        wire = self._sender.finish()
        facts = {"num_bytes": wire.num_bytes, "digests": [each.hex() for each in digests.buckets]}
        return _times(wire, started) | facts

    def sums(self, message: Message) -> Message:
        """See `End`."""
        return {"sums": {name: _sum(part) for name, part in self._tensors.items()}}


class Receiver:
    """See `End`."""

    def __init__(self, shape: Shape, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._parameters: dict[str, Tensor] = {}
        self._places: dict[str, tuple[str, Tensor]] = {}
        for name, fused, part in _vllm_parts(shape, device):
            self._parameters.setdefault(fused, part if part._base is None else part._base)
            self._places[name] = (fused, part)

    def announce(self, message: Message) -> Message:
        """See `End`: raises, since a receiver announces nothing."""
        raise RuntimeError("a receiver announces nothing")

    def join(self, message: Message) -> Message:
        """See `End`."""
        where = weights_pb2.Communicator.FromString(bytes.fromhex(message["communicator"]))
        layout = weights_pb2.WeightLayout.FromString(bytes.fromhex(message["layout"]))
        seat = Seat(where, self._rank, LIMITS["join_deadline_s"])
        self._transport: Any = TRANSPORTS[where.transport](seat, self._device)
        self.group = self._transport._group
        buckets = tuple(layout_from_pb(layout))
        self._incoming = Incoming(buckets, LIMITS["bucket_deadline_s"], own_buffers=False)
        copies = tuple(
            tuple(
                Copy(
                    bucket=place,
                    dtype=DTYPE,
                    source=View(span.offset_bytes // DTYPE.itemsize, part.shape, part.stride()),
                    parameter=fused,
                    destination=View.of(part),
                )
                for span in bucket.spans
                for fused, part in [self._places[span.tensor.name]]
            )
            for place, bucket in enumerate(buckets)
        )
        self._replay = Replay(CopyPlan(buckets, copies), self._parameters)
        for place, buffer in enumerate(self._transport.prepare(self._incoming)):
            self._replay.prepare(place, buffer)
        return {}

    def prepare(self, message: Message) -> Message:
        """See `End`: a receiver has nothing to do before a publish."""
        return {}

    def publish(self, message: Message) -> Message:
        """See `End`: begins after `delay_s` seconds, as in an engine that has to pause."""
        time.sleep(message["delay_s"])
        started = time.perf_counter()
        for place, buffer in enumerate(self._transport.receive(self._incoming)):
            self._replay.run(place, buffer)
        digests = self._transport.digests()
        return _times(self._transport.take_wire(), started) | {
            "digests": [digest.hex() for digest in digests]
        }

    def sums(self, message: Message) -> Message:
        """See `End`."""
        return {"sums": {name: _sum(part) for name, (_, part) in self._places.items()}}


class Raw:
    """One broadcast of a large buffer through a group."""

    def __init__(self, group: NcclGroup, num_bytes: int) -> None:
        self._group, self._stream = group, torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    def broadcast(self, delay_s: float) -> Message:
        """Broadcasts the buffer after `delay_s` seconds; returns its times."""
        time.sleep(delay_s)
        started, pointer = time.perf_counter(), self._buffer.data_ptr()
        size, handle = self._buffer.numel(), self._stream.cuda_stream
        self._group.broadcast(pointer, size, 0, handle, deadline_s=LIMITS["bucket_deadline_s"])
        self._stream.synchronize()
        self._group.wait()
        return _times(self._group.take_wire(), started)


def _megatron_parts(shape: Shape, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yields name and view of each tensor, fused as Megatron's parameters are.

    Queries, keys and values are fused by group, gate and up projections in one tensor.
    """
    generator = torch.Generator(device).manual_seed(1)
    heads = shape.heads // shape.groups
    group = (shape.groups, heads + 2, shape.head_dim, shape.hidden)
    fused, gate_up = torch.empty(0), torch.empty(0)
    for name, sizes in shape.tensors():
        if name.endswith("q_proj.weight"):
            fused = torch.empty(group, dtype=DTYPE, device=device).normal_(
                std=STD, generator=generator
            )
            yield name, fused[:, :heads]
        elif name.endswith("k_proj.weight"):
            yield name, fused[:, heads]
        elif name.endswith("v_proj.weight"):
            yield name, fused[:, heads + 1]
        elif name.endswith("gate_proj.weight"):
            both = (2 * shape.intermediate, shape.hidden)
            gate_up = torch.empty(both, dtype=DTYPE, device=device).normal_(
                std=STD, generator=generator
            )
            yield name, gate_up[: shape.intermediate]
        elif name.endswith("up_proj.weight"):
            yield name, gate_up[shape.intermediate :]
        else:
            whole = torch.empty(sizes, dtype=DTYPE, device=device)
            yield name, whole.normal_(std=STD, generator=generator)


def _vllm_parts(shape: Shape, device: torch.device) -> Iterator[tuple[str, str, Tensor]]:
    """Yields the name of each tensor, that of the parameter that holds it, and its rows there."""
    fusions = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "both"}
    fusions["up_proj"] = "both"
    rows = {
        "qkv": (shape.heads + 2 * shape.groups) * shape.head_dim,
        "both": 2 * shape.intermediate,
    }
    fused, used, fused_name = torch.empty(0), 0, ""
    for name, sizes in shape.tensors():
        prefix, _, last = name.removesuffix(".weight").rpartition(".")
        if last not in fusions:
            yield name, name, torch.zeros(sizes, dtype=DTYPE, device=device)
            continue
        wanted = f"{prefix}.{fusions[last]}"
        if wanted != fused_name:
            whole = (rows[fusions[last]], shape.hidden)
            fused, used = torch.zeros(whole, dtype=DTYPE, device=device), 0
            fused_name = wanted
        yield name, fused_name, fused[used : used + sizes[0]]
        used += sizes[0]


def _sum(tensor: Tensor) -> int:
    return int(tensor.contiguous().view(torch.int16).sum(dtype=torch.int64))


def _times(wire: Wire, started: float) -> Message:
    return {"wire_s": wire.seconds, "host_s": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("role", choices=("sender", "receiver"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--bucket-mib", type=int, default=WeightsSection().bucket_mib)
    arguments = parser.parse_args()
    set_nccl_environment(os.environ)
    pipe = Pipe()
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        # All ends share the processor: threads of one would wait for those of another.
        torch.set_num_threads(1)
    shape = SHAPES[arguments.shape]
    end: Any
    if arguments.role == "sender":
        end = Sender(shape, device, arguments.bucket_mib)
    else:
        end = Receiver(shape, device, arguments.rank)
    raw: Raw | None = None
    pipe.put(ready=True)
    with contextlib.suppress(EOFError):
        while True:
            message = pipe.get()
            try:
                if message["do"] == "raw":
                    raw = raw or Raw(end.group, message["num_bytes"])
                    answer = raw.broadcast(message["delay_s"] if arguments.rank else 0.0)
                else:
                    answer = getattr(end, message["do"])(message)
            except Exception as error:
                pipe.put(error=f"{type(error).__name__}: {error}")
                raise
            pipe.put(**answer)


if __name__ == "__main__":
    main()
