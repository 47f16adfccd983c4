"""The split of packed sequences over context parallel ranks: pure functions.

Every sequence is cut into 2 * size chunks of equal length. Rank r holds chunks r and
2 * size - 1 - r of each sequence, so that all ranks have about equal work under a causal mask.
Megatron's rotary embedding and TransformerEngine's attention expect this order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from torch import Tensor


def zigzag(bounds: Sequence[int], rank: int, size: int) -> Tensor:
    """Returns int64 places in the whole micro batch of the tokens of `rank`, in its order.

    `bounds` has the start of each sequence, and the end. With more than one rank every length must
    be a multiple of 2 * size, and each rank holds 1 / size of a sequence.
    """
    if size == 1:
        return torch.arange(bounds[-1])
    parts = []
    for start, end in itertools.pairwise(bounds):
        chunk, rest = divmod(end - start, 2 * size)
        assert rest == 0, f"a sequence of {end - start} tokens cannot be cut for cp {size}"
        starts = (start + place * chunk for place in (rank, 2 * size - 1 - rank))
        parts += [torch.arange(first, first + chunk) for first in starts]
    return torch.cat(parts)


@functools.lru_cache(maxsize=16)
def gathered_places(bounds: tuple[int, ...], size: int) -> Tensor:
    """Returns each token's place in the tokens of all ranks joined in rank order."""
    return torch.cat([zigzag(bounds, rank, size) for rank in range(size)]).argsort()


def share_of_rank(whole: MicroBatch, rank: int, size: int) -> MicroBatch:
    """Returns one context parallel rank's share of a micro batch.

    `cu_seqlens` and `max_seqlen` still describe the whole sequences.
    """
    if size == 1:
        return whole
    places = zigzag(whole.cu_seqlens.tolist(), rank, size)
    return whole.map_tokens(lambda tensor: tensor[places])
