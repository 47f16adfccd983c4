"""The learner's side of a weight transfer in plain torch: rank 0 of a gloo group."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from slipstream.core.types import PolicyVersion
from slipstream.protocol.codec import version_to_pb
from slipstream.protocol.weights.buckets import (
    Bucket,
    TensorSpec,
    adapter_buckets,
    layout_from_pb,
    layout_to_pb,
)
from slipstream.protocol.weights.digests import bucket_digest, bucket_tensor_digests
from slipstream.v1 import weights_pb2
from torch._C import _distributed_c10d as c10d

from support.rigs.waiting import LIMIT_S


class GlooSender:
    """One communicator: the sender and `num_workers` receivers behind it."""

    def __init__(
        self,
        communicator_id: str,
        *,
        num_workers: int = 1,
        deadline_s: float = LIMIT_S,
        join_deadline_s: float = LIMIT_S,
    ):
        """`deadline_s`: of each bucket; may be changed between publishes."""
        self.deadline_s = deadline_s
        self._join_timeout = timedelta(seconds=join_deadline_s)
        self._store = c10d.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=self._join_timeout,
        )
        self.communicator = weights_pb2.Communicator(
            communicator_id=communicator_id,
            transport="gloo",
            store_host="127.0.0.1",
            store_port=self._store.port,
            world_size=1 + num_workers,
        )
        self._group: c10d.ProcessGroupGloo | None = None

    def order(self, publish_id: str, step: int) -> weights_pb2.PublishOrder:
        """An order for this communicator; the first one builds it."""
        return weights_pb2.PublishOrder(
            publish_id=publish_id,
            version=version_to_pb(PolicyVersion(0, step)),
            communicator=self.communicator,
            new_communicator=self._group is None,
            bucket_deadline_s=self.deadline_s,
            join_deadline_s=self._join_timeout.total_seconds(),
        )

    def join(self) -> None:
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = self._join_timeout
        store = c10d.PrefixStore(self.communicator.communicator_id, self._store)
        self._group = c10d.ProcessGroupGloo(
            store, 0, self.communicator.world_size, options
        )

    def send(
        self,
        layout: weights_pb2.WeightLayout,
        tensors: Mapping[str, torch.Tensor],
        *,
        max_buckets: int | None = None,
        more: Sequence[Mapping[str, torch.Tensor]] = (),
    ) -> list[bytes]:
        """Joins if need be and sends; digests of the buckets. `max_buckets`: stops too early.

        `more`: the tensors of each adapter after the first.
        """
        if self._group is None:
            self.join()
        digests = []
        timeout = timedelta(seconds=self.deadline_s)
        buckets = layout_from_pb(layout)
        of_each = len(adapter_buckets(layout))
        of_each //= 1 + len(more)
        first = len(buckets) - len(more) * of_each
        for place, bucket in enumerate(buckets[:max_buckets]):
            if place >= first:
                tensors = more[(place - first) // of_each]
            buffer = pack(bucket, tensors)
            options = c10d.BroadcastOptions()
            options.rootRank = 0
            options.rootTensor = 0
            options.timeout = timeout
            self._group.broadcast([buffer], options).wait(timeout)
            digests.append(
                bucket_digest(bucket_tensor_digests(bucket, buffer.numpy().data))
            )
        return digests

    def digests(
        self, layout: weights_pb2.WeightLayout, tensors: Mapping[str, torch.Tensor]
    ) -> list[bytes]:
        return [
            bucket_digest(
                bucket_tensor_digests(bucket, pack(bucket, tensors).numpy().data)
            )
            for bucket in layout_from_pb(layout)
        ]


def pack(bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The bytes of a bucket; padding is zero."""
    buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for span in bucket.spans:
        data = tensors[span.tensor.name].contiguous().view(torch.uint8).flatten()
        buffer[span.offset_bytes : span.offset_bytes + span.tensor.num_bytes] = data
    return buffer


def layout_of(
    tensors: Mapping[str, torch.Tensor], bucket_bytes: int = 20_000
) -> weights_pb2.WeightLayout:
    """The layout of these tensors; small buckets, so that layers are split over several."""
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    return layout_to_pb(specs, bucket_bytes)
