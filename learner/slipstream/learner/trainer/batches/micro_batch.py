"""Packed sequences as tensors, split over context parallel ranks and moved to their devices.

For the split every sequence is cut into 2 * size chunks of equal length. Rank r holds chunks r and
2 * size - 1 - r of each sequence, so that all ranks have about equal work under a causal mask.
Megatron's rotary embedding and TransformerEngine's attention expect this order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from slipstream.learner.trainer.batches.images import ImageInputs
from slipstream.learner.trainer.batches.token_fields import TokenFields
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MicroBatch(TokenFields[Tensor]):
    """Packed sequences; tensors are [tokens] unless a comment says otherwise."""

    position_ids: Tensor
    # Weight of each token in the loss; the sum is divided by the trained tokens of all ranks.
    loss_weights: Tensor
    # int64: for each token the place of its sequence in `indices`; filler has `len(indices)`.
    sequence_ids: Tensor
    # bool: whether a token is padding of a sequence, or filler.
    is_padding: Tensor
    # int32: the start of each sequence, and the end of the last; filler is a last sequence without
    # loss.
    cu_seqlens: Tensor
    max_seqlen: int
    # Indices of the sequences, in order, without filler.
    indices: tuple[int, ...]
    # int64: for each token the index of its algorithm; None if all tokens have algorithm 0.
    algorithm_ids: Tensor | None = None
    # Keys of tree attention; None if each sequence attends to its own tokens.
    paths: Paths | None = None
    # None if no sequence has images.
    images: ImageInputs | None = None

    @property
    def all_targets(self) -> Tensor:
        """The tokens whose log-probabilities the loss reads, `targets` first, then `top_ids`.

        The shape is [tokens], or [tokens, 1 + top k] if there are `top_ids`.
        """
        if self.top_ids is None:
            return self.targets
        return torch.cat([self.targets[:, None], self.top_ids], dim=1)

    def map_tokens(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Returns a micro batch with `change` applied to every tensor whose first dim is tokens."""
        tensors: dict[str, Any] = {
            name: change(value)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "cu_seqlens"
        }
        return dataclasses.replace(self, **tensors)

    def to(self, device: torch.device) -> MicroBatch:
        """Returns a copy on `device`, or itself for a CPU, without waiting for the device."""
        if device.type == "cpu":
            return self
        moved = self.map_tokens(lambda tensor: to_device(tensor, device))
        return dataclasses.replace(
            moved,
            cu_seqlens=to_device(self.cu_seqlens, device),
            paths=self.paths and self.paths.to(device),
            images=self.images and self.images.to(device),
        )


@dataclass(frozen=True)
class Paths:
    """The keys for tree attention: a segment attends to all tokens on its path from the root.

    In a micro batch with `Paths`, `cu_seqlens` bounds segments instead of sequences. A segment's
    own tokens are the last of its keys.
    """

    # int64 [keys]: the index in the micro batch of each key, segment by segment.
    key_places: Tensor
    # int32: the start of each segment's keys, and the end of the last.
    cu_seqlens: Tensor
    max_seqlen: int
    # The copies of token t among the keys are `copies[copy_bounds[t] : copy_bounds[t + 1]]`.
    copies: Tensor
    copy_bounds: Tensor

    @classmethod
    def of(cls, places: Sequence[npt.NDArray[np.int64]], num_tokens: int) -> Paths:
        """Returns the keys of a micro batch of `num_tokens` tokens.

        `places` has an array for each segment: the indices of its keys.
        """
        lengths = [len(keys) for keys in places]
        joined = np.concatenate(places)
        counts = np.bincount(joined, minlength=num_tokens)
        return cls(
            key_places=torch.from_numpy(joined),
            cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
            max_seqlen=max(lengths),
            copies=torch.from_numpy(joined.argsort(kind="stable")),
            copy_bounds=torch.from_numpy(np.cumsum([0, *counts])),
        )

    def to(self, device: torch.device) -> Paths:
        """Returns a copy on `device`, without waiting for the device."""
        tensors: dict[str, Any] = {
            name: to_device(value, device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **tensors)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on `device`, or `tensor` itself for a CPU.

    Pinned memory avoids a wait for the device's earlier work.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def zigzag(bounds: Sequence[int], rank: int, size: int) -> Tensor:
    """Returns the indices of the tokens that context parallel rank `rank` of `size` holds, int64.

    The indices refer to the whole micro batch, in the order in which the rank holds the tokens.
    `bounds` has the start of each sequence, and the end of the last. With more than one rank every
    length must be a multiple of 2 * size, and each rank holds 1 / size of a sequence.
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
    """Returns for each token of a micro batch its index in the concatenated shares of all ranks.

    `bounds` has the start of each sequence, and the end of the last.
    """
    return torch.cat([zigzag(bounds, rank, size) for rank in range(size)]).argsort()


def share_of_rank(whole: MicroBatch, rank: int, size: int) -> MicroBatch:
    """Returns one context parallel rank's share of a micro batch.

    `cu_seqlens` and `max_seqlen` still describe the whole sequences.
    """
    if size == 1:
        return whole
    places = zigzag(whole.cu_seqlens.tolist(), rank, size)
    return whole.map_tokens(lambda tensor: tensor[places])
