"""The policy's weights as a stream of filled buckets, on the device, with memory for two buckets.

Consumes: parameters. Produces: buckets on their senders, and the digest of every tensor. On CUDA
all work is enqueued on a separate stream: bucket k + 1 is filled while bucket k is sent.
"""

import contextlib
import io
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import WeightsSection
from slipstream.learner.trainer.model.model import MemoryPart
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.weights.bucket_fill import (
    BridgeFilling,
    ExportedPart,
    Filling,
    exported,
    plan_filling,
)
from slipstream.learner.trainer.weights.export_plan import UnknownMapping
from slipstream.protocol.weights.buckets import (
    ALIGNMENT_BYTES,
    Bucket,
    TensorSpan,
    TensorSpec,
    plan_buckets,
)
from slipstream.protocol.weights.digests import bucket_digest, open_digests, weight_digest
from torch import Tensor

logger = logging.getLogger(__name__)

NUM_LANES = 2
_DIGEST_BYTES = 16

# Function that makes the current stream wait until the lane may be filled again; None if work that
# follows on that stream may fill it.
Release = Callable[[], None] | None
# Function that every sender calls for every bucket: (number, bucket, memory for it) -> Release.
# On the bucket's own sender the memory is filled once the current stream reaches this call.
Send = Callable[[int, Bucket, Tensor], Release]


class WeightStream:
    """Fills buckets one after another, in alternating buffers (lanes).

    Every method is collective. `run` is one pass over all weights. `fill_ahead` may fill the first
    buckets before a `run` that sends, which then starts with them.
    """

    def __init__(
        self,
        policy: Policy,
        filling: Filling,
        *,
        bucket_bytes: int,
    ) -> None:
        self._policy = policy
        self._filling = filling
        self.bucket_bytes = bucket_bytes
        self.tensors = filling.tensors
        self.senders = filling.senders
        rank = policy.ranks.rank
        # The rank's index in `senders`; None if it does not send.
        self.sender = self.senders.index(rank) if rank in self.senders else None
        self.buckets = tuple(plan_buckets(self.tensors, bucket_bytes))
        self.num_bytes = sum(bucket.num_bytes for bucket in self.buckets)
        self.largest_bucket = max(bucket.num_bytes for bucket in self.buckets)
        self._own = [self.senders[b.root] == rank for b in self.buckets]
        device = policy.ranks.device
        # Ranks that do not send need no lanes.
        size = self.largest_bucket if self.sender is not None else 0
        lanes = min(NUM_LANES, len(self.buckets))
        self._lanes = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(lanes)]
        # Number of first buckets that are already filled.
        self._ahead = 0
        gpu = device.index if device.type == "cuda" else None
        self._digests = open_digests(self.buckets, gpu)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with policy.memory.resident(MemoryPart.PARAMETERS):
            filling.prepare(self.buckets, self._lanes)

    @property
    def num_parameters(self) -> int:
        return sum(torch.Size(tensor.shape).numel() for tensor in self.tensors)

    def resident(self) -> AbstractContextManager[None]:
        """Keeps the parameters on the device inside the context; a pass then begins at once."""
        return self._policy.memory.resident(MemoryPart.PARAMETERS)

    @torch.no_grad()
    def fill_ahead(self) -> None:
        """Fills the first buckets before the next pass, which uses them only if it sends.

        The caller must have made a pass over these weights before, so that parameters are gathered,
        and must not change the weights until the next pass. Does nothing if buckets must be filled
        in order.
        """
        if self._ahead or not self._filling.fills_any:
            return
        with self.resident(), self._on_stream():
            for place in range(len(self._lanes)):
                self._filling.fill(place)
        self._ahead = len(self._lanes)

    @torch.no_grad()
    def run(self, send: Send | None = None) -> "WeightDigests":
        """Fills every bucket once, calls `send` with it on the senders, and returns all digests.

        Without `send`, the pass only computes the digests.
        """
        ahead = self._ahead if send is not None else 0
        self._ahead = 0
        releases: list[Release] = [None] * len(self._lanes)
        with self.resident():
            if not ahead:
                self._policy.gather_parameters()
            with self._on_stream():
                for place, bucket in enumerate(self.buckets):
                    lane = place % len(self._lanes)
                    release = releases[lane]
                    if release is not None:
                        release()
                    if place >= ahead:
                        self._filling.fill(place)
                    data = self._lanes[lane][: bucket.num_bytes]
                    if send is not None and self.sender is not None:
                        releases[lane] = send(place, bucket, data)
                    # The digest is taken while the bucket travels; the lane is refilled later on
                    # the same stream.
                    if self._own[place]:
                        self._digests.add(place, data.data_ptr(), self._handle)
                bucket_digests = self._digests.read(self._handle)
        # A rank sends the digests of its own buckets, in order.
        own_digests = b"".join(itertools.chain(*itertools.compress(bucket_digests, self._own)))
        rest = [io.BytesIO(part) for part in self._policy.ranks.gather_bytes(own_digests)]
        by_name: dict[str, bytes] = {}
        of_buckets = []
        for bucket in self.buckets:
            digests = rest[self.senders[bucket.root]]
            of_bucket = [digests.read(_DIGEST_BYTES) for _ in bucket.spans]
            by_name |= zip((span.tensor.name for span in bucket.spans), of_bucket, strict=True)
            of_buckets.append(bucket_digest(of_bucket))
        return WeightDigests(by_name, tuple(of_buckets))

    @property
    def _handle(self) -> int:
        return self._stream.cuda_stream if self._stream is not None else 0

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)


@dataclass(frozen=True)
class WeightDigests:
    """The digests from one pass over the weights; the same on every rank."""

    by_name: dict[str, bytes]
    buckets: tuple[bytes, ...]

    @property
    def identity(self) -> bytes:
        """The digest of all tensors; it does not depend on the rank layout or bucket size."""
        return weight_digest(self.by_name)


def open_stream(
    policy: Policy,
    config: Config,
    kind: ExportedPart = ExportedPart.MERGED,
    *,
    beside: WeightStream | None = None,
) -> WeightStream:
    """Returns a stream of the weights of `kind`; collective.

    The stream is filled by a plan, or by Bridge's export if there is no plan or it gives other
    weights. It has the same senders and bucket size as the stream `beside`, if given.
    """
    senders = () if beside is None else beside.senders

    def opened(filling: Filling) -> WeightStream:
        own_size = bucket_bytes(config.weights, filling.tensors)
        size = own_size if beside is None else beside.bucket_bytes
        return WeightStream(policy, filling, bucket_bytes=size)

    with policy.memory.resident(MemoryPart.PARAMETERS):
        try:
            stream = opened(plan_filling(policy, kind, senders=senders))
        except UnknownMapping as error:
            problem = str(error)
        else:
            problem = difference(stream.run().by_name, bridge_digests(policy, kind))
            # All ranks have all digests, but only rank 0 surely has all of Bridge's tensors.
            data = problem.encode() if policy.ranks.is_main else None
            problem = policy.ranks.broadcast_bytes(data).decode()
            if not problem:
                return stream
            # The stream's memory is freed before another stream takes as much.
            del stream
        if policy.ranks.is_main:
            logger.warning("weights are exported by Megatron-Bridge, tensor by tensor: %s", problem)
        return opened(BridgeFilling(policy, kind, senders=senders or (0,)))


def bridge_digests(policy: Policy, kind: ExportedPart) -> dict[str, bytes]:
    """Returns the digest of every tensor of Bridge's export, by name; collective."""
    digests_by_name = {}
    for name, tensor in exported(policy, kind):
        kind_of_element = str(tensor.dtype).removeprefix("torch.")
        spec = TensorSpec(name, kind_of_element, tuple(tensor.shape))
        bucket = Bucket((TensorSpan(spec, 0),), spec.num_bytes)
        digests = open_digests((bucket,), tensor.device.index if tensor.is_cuda else None)
        handle = torch.cuda.current_stream().cuda_stream if tensor.is_cuda else 0
        # A view into a parameter may begin anywhere.
        aligned = tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()
        digests.add(0, aligned.data_ptr(), handle)
        digests_by_name[name] = digests.read(handle)[0][0]
    return digests_by_name


def difference(ours: dict[str, bytes], exported: dict[str, bytes]) -> str:
    """Returns a description of the first difference, or "" if all digests are the same."""
    if missing := sorted(set(exported) ^ set(ours)):
        return f"{missing[0]} is in only one of the plan and Bridge's export"
    wrong = sorted(name for name, digest in exported.items() if ours[name] != digest)
    return f"the plan's {wrong[0]} differs from Bridge's export" if wrong else ""


def bucket_bytes(weights: WeightsSection, tensors: Sequence[TensorSpec]) -> int:
    """Returns the bytes of `weights.bucket_mib`, or more: equal buckets keep the link busy."""
    return max(weights.bucket_mib << 20, *(tensor.num_bytes for tensor in tensors))
