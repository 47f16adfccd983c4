"""Packing of sequences into micro batches of bounded size, which context parallel ranks split.

A micro batch is one row of tokens: either its sequences one after the other, or the segments of
bundles, in which a shared prefix of sequences is stored once. The target of a position is the token
that the position predicts.

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
from slipstream.learner.trainer.batches.planner import round_up
from slipstream.learner.trainer.batches.training_sequence import (
    TOKEN_FIELDS,
    ImageInputs,
    TokenFields,
    TrainingSequence,
)
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


@dataclasses.dataclass(frozen=True)
class Segment:
    """Positions `start` to `end` of sequence `index`, which other sequences may share.

    `parent` is the index, in the bundle, of the previous segment on the path, or None at the
    beginning of a sequence. Only the sequence `index` trains any of these positions.
    """

    index: int
    start: int
    end: int
    parent: int | None = None

    def __len__(self) -> int:
        return self.end - self.start


# Segments of one bundle; a parent comes before its children, so that the segments of each sequence
# are in order.
Bundle = list[Segment]


def build_micro_batch(
    sequences: Sequence[TrainingSequence],
    indices: Sequence[int],
    *,
    multiple: int = 1,
    sequence_multiple: int = 1,
) -> MicroBatch:
    """Packs the sequences at `indices`, and filler behind them, into one micro batch.

    Filler makes the number of tokens divisible by `multiple`. Each sequence is padded at its end to
    a length divisible by `sequence_multiple`, which must divide `multiple`; padding has no loss,
    and does not affect the tokens before it. If there are no `indices`, the micro batch is all
    filler, so it is never empty. `sequences` are all sequences of the step; filler has the same
    fields as the first of them.
    """
    segments = [Segment(index, 0, len(sequences[index])) for index in indices]
    parts = [_padded(sequences[index], sequence_multiple) for index in indices]
    return _packed(sequences, segments, parts, multiple)


def build_tree_micro_batch(
    sequences: Sequence[TrainingSequence], bundles: Sequence[Bundle], *, multiple: int = 1
) -> MicroBatch:
    """Packs the segments of `bundles`, and filler behind them, into one micro batch.

    Filler makes the number of tokens divisible by `multiple`. Positions count from the beginning of
    a sequence. The target of a segment's last position is the next token of the segment's sequence.
    `MicroBatch.indices` names each sequence once.
    """
    segments = [segment for bundle in bundles for segment in bundle]
    parts = [_cut(sequences[segment.index], segment) for segment in segments]
    packed = _packed(sequences, segments, parts, multiple)
    bounds = packed.cu_seqlens.tolist()
    # The keys of all segments, and of the filler after them.
    places: list[npt.NDArray[np.int64]] = []
    for bundle in bundles:
        first = len(places)
        for segment in bundle:
            mine = np.arange(bounds[len(places)], bounds[len(places) + 1])
            before = [] if segment.parent is None else [places[first + segment.parent]]
            places.append(np.concatenate([*before, mine]))
    if len(places) < len(bounds) - 1:
        places.append(np.arange(bounds[-2], bounds[-1]))
    return dataclasses.replace(packed, paths=Paths.of(places, bounds[-1]))


def _packed(
    sequences: Sequence[TrainingSequence],
    segments: Sequence[Segment],
    parts: Sequence[TrainingSequence],
    multiple: int,
) -> MicroBatch:
    """Joins `parts`, which are the tokens of `segments`, and filler into one micro batch."""
    num_tokens = sum(map(len, parts))
    missing = round_up(max(1, num_tokens), multiple) - num_tokens
    filler = []
    if missing:
        nothing = np.zeros(0, dtype=np.uint32)
        like = sequences[0] if sequences else TrainingSequence.of_tokens(nothing)
        filled: dict[str, Any] = {
            name: column.filled(missing, array)
            for name, column in TOKEN_FIELDS.items()
            if (array := getattr(like, name)) is not None
        }
        filler = [TrainingSequence(**filled)]
    place_of: dict[int, int] = {}
    for segment in segments:
        place_of.setdefault(segment.index, len(place_of))
    places = [place_of[segment.index] for segment in segments] + [len(place_of)] * len(filler)
    starts = [segment.start for segment in segments] + [0] * len(filler)
    parts = [*parts, *filler]
    lengths = np.array([len(part) for part in parts])
    ends = np.cumsum(lengths)
    own = np.array([segment.end - segment.start for segment in segments] + [0] * len(filler))
    weights = np.array([part.loss_weight for part in parts], dtype=np.float32)
    first = np.repeat(ends - lengths - np.asarray(starts), lengths)
    images = [part.images for part in parts]
    fields: dict[str, Any] = {}
    for name, column in TOKEN_FIELDS.items():
        arrays = [getattr(part, name) for part in parts]
        if any(array is not None for array in arrays):
            whole = column.joined(arrays, lengths.tolist())
            # torch supports hardly any operation on unsigned integers of two bytes.
            fields[name] = torch.from_numpy(
                whole.astype(np.int32) if whole.dtype == np.uint16 else whole
            )
    return MicroBatch(
        **fields,
        position_ids=torch.from_numpy(np.arange(ends[-1]) - first),
        loss_weights=torch.from_numpy(np.repeat(weights, lengths)),
        sequence_ids=torch.from_numpy(np.repeat(np.asarray(places), lengths)),
        is_padding=torch.from_numpy(
            np.arange(ends[-1]) >= np.repeat(ends - lengths + own, lengths)
        ),
        cu_seqlens=torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        max_seqlen=int(lengths.max()),
        indices=tuple(place_of),
        images=ImageInputs.of(images, lengths.tolist()) if any(images) else None,
    )


def _padded(sequence: TrainingSequence, multiple: int) -> TrainingSequence:
    missing = -len(sequence) % multiple
    if not missing:
        return sequence
    return sequence.map_fields(
        lambda array, column: np.concatenate([array, column.filled(missing, array)])
    )


def _cut(sequence: TrainingSequence, segment: Segment) -> TrainingSequence:
    return sequence.map_fields(lambda array, _: array[segment.start : segment.end])
