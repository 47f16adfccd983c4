"""What several versions in a row change, joined into the one delta that an engine takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.deltas import (
    ELEMENT_BYTES,
    Elements,
    Places,
    payload_of,
    travels_whole,
)
from slipstream.v1 import weights_pb2


class JoinedChanges:
    """Collects the places that change in each bucket: 4 bytes of memory for each.

    changes = JoinedChanges(buckets)
    changes.add(place, places)  # for each bucket of each version
    delta = changes.write(path, base, elements_of)  # with what the last version has there
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        # None: the bucket came whole.
        self._places: list[list[npt.NDArray[np.uint32]] | None] = [[] for _ in buckets]

    def add(self, place: int, places: Places | None) -> None:
        """Notes changes of bucket `place`; None stands for all of its elements."""
        earlier = self._places[place]
        if places is None or earlier is None:
            self._places[place] = None
        elif len(places):
            earlier.append(places.astype(np.uint32))

    def write(
        self, path: Path, base: bytes, elements_of: Callable[[int], Elements]
    ) -> weights_pb2.Delta | None:
        """Writes all buckets to `path` as they travel, one after the other, and describes them.

        Returns None, and writes nothing, where every bucket would travel whole. OSError when the
        disk does not take it.
        """
        joined = [self._joined(place) for place in range(len(self._buckets))]
        # A number with which the bucket travels whole.
        counts = [
            bucket.num_bytes // ELEMENT_BYTES if places is None else len(places)
            for bucket, places in zip(self._buckets, joined, strict=True)
        ]
        wholes = list(map(travels_whole, self._buckets, counts))
        if all(wholes):
            return None
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for place, (bucket, places) in enumerate(zip(self._buckets, joined, strict=True)):
                elements = elements_of(place)
                if places is None or wholes[place]:
                    file.write(elements.data)
                else:
                    file.write(payload_of(elements, places, bucket))
        return weights_pb2.Delta(base=base, changed=counts)

    def _joined(self, place: int) -> Places | None:
        found = self._places[place]
        if found is None:
            return None
        return np.unique(np.concatenate([np.empty(0, np.uint32), *found])).astype(np.int64)
