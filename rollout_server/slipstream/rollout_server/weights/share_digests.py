"""The digests of whole buckets, from the sums of the shares that an engine's workers hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from slipstream.protocol.weights.digests import bucket_digest

# The two sums of a tensor's digest.
_SUMS = 2

Numbers = npt.NDArray[np.uint64]
# One worker's share of a bucket, in hex: for each tensor the 16 bytes of its sums, and 8 bytes that
# name the part of the tensor that the worker holds.
Share: TypeAlias = tuple[str, str]


def whole_digests(workers: Sequence[Sequence[Share]]) -> list[bytes]:
    """Returns the digest of each bucket, from each worker's shares of all buckets.

    A tensor's digest is a sum over its words, so the digests of its shares add up. A share that
    several workers hold counts once; shares that overlap in part give a wrong digest.
    """
    return [_whole_digest(shares) for shares in zip(*workers, strict=True)]


def _whole_digest(shares: Sequence[Share]) -> bytes:
    total, seen = np.zeros((), np.uint64), list[Numbers]()
    for in_hex, named in shares:
        names, sums = _numbers(named), _numbers(in_hex).reshape(-1, _SUMS)
        is_new = np.all([np.ones(len(names), bool), *(names != other for other in seen)], axis=0)
        total = total + np.where(is_new[:, None], sums, np.uint64(0))
        seen.append(names)
    return bucket_digest(row.tobytes() for row in total)


def _numbers(text: str) -> Numbers:
    return np.frombuffer(bytes.fromhex(text), dtype="<u8")
