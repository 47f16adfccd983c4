"""Versions of small weights in storage, written as a trainer of one or two senders writes them."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from slipstream.extensions.stored_weights.storage import Storage, Until
from slipstream.extensions.stored_weights.trainer import RankObjects
from slipstream.protocol.weights.buckets import (
    Bucket,
    TensorSpec,
    layout_to_pb,
    plan_buckets,
)
from slipstream.protocol.weights.digests import bucket_digest, bucket_tensor_digests
from slipstream.v1 import trajectory_pb2, weights_pb2

TENSORS = [
    TensorSpec("a", "bfloat16", (40, 1000)),
    TensorSpec("b", "bfloat16", (7,)),
    TensorSpec("c", "bfloat16", (30, 1000)),
    TensorSpec("d", "float32", (9_001,), sender=1),
]
BUCKET_BYTES = 100_000
BUCKETS = tuple(plan_buckets(TENSORS, BUCKET_BYTES))
Content = list[npt.NDArray[np.uint8]]


def soon() -> Until:
    return Until(20.0)


def first_content() -> Content:
    """The bytes of all buckets, with zeros between tensors."""
    random = np.random.default_rng(0)
    content = [np.zeros(bucket.num_bytes, np.uint8) for bucket in BUCKETS]
    for data, bucket in zip(content, BUCKETS, strict=True):
        for span in bucket.spans:
            end = span.offset_bytes + span.tensor.num_bytes
            data[span.offset_bytes : end] = random.integers(
                0, 256, span.tensor.num_bytes
            )
    return content


def changed_content(content: Content, *, share: float, seed: int) -> Content:
    """The same with a share of other 16-bit elements."""
    random = np.random.default_rng(seed)
    new = [data.copy() for data in content]
    for data, bucket in zip(new, BUCKETS, strict=True):
        for span in bucket.spans:
            end = span.offset_bytes + span.tensor.num_bytes
            elements = data[span.offset_bytes : end].view(np.uint16)
            elements[random.random(len(elements)) < share] ^= 1
    return new


def digests_of(content: Content, buckets: Sequence[Bucket] = BUCKETS) -> list[bytes]:
    return [
        bucket_digest(bucket_tensor_digests(bucket, data.tobytes()))
        for bucket, data in zip(buckets, content, strict=True)
    ]


class StoredVersions:
    """Writes versions by two senders; `manifest` names each as the controller would."""

    def __init__(self, url: str) -> None:
        self.storage = Storage(url)
        self.layout = layout_to_pb(TENSORS, BUCKET_BYTES)
        self.writers = [
            RankObjects(
                list(BUCKETS), sender, self.storage, object_bytes=150_000, pin=False
            )
            for sender in (0, 1)
        ]
        self.chain: list[weights_pb2.StoredLink] = []

    def write(
        self, step: int, content: Content, *, whole: bool
    ) -> weights_pb2.StoredWeights:
        links = []
        digests = digests_of(content)
        for writer in self.writers:
            for place, (bucket, data) in enumerate(zip(BUCKETS, content, strict=True)):
                writer.take(place, bucket, torch.from_numpy(data))
            links.append(
                writer.write(f"run/v{step}", digests, whole=whole, until=soon())
            )
        link = weights_pb2.StoredLink(
            version=trajectory_pb2.PolicyVersion(step=step), bucket_digests=digests
        )
        for part in links:
            link.objects.extend(part.objects)
        if not whole:
            both = zip(*(part.delta.changed for part in links), strict=True)
            link.delta.changed.extend(map(sum, both))
        self.chain = [link] if whole else [*self.chain, link]
        return self.manifest(f"run/v{step}/manifest")

    def manifest(self, key: str) -> weights_pb2.StoredWeights:
        manifest = weights_pb2.StoredManifest(layout=self.layout, links=self.chain)
        data = manifest.SerializeToString()
        self.storage.write(key, memoryview(data), soon())
        digest = hashlib.blake2b(data, digest_size=32).digest()
        return weights_pb2.StoredWeights(key=key, num_bytes=len(data), digest=digest)
