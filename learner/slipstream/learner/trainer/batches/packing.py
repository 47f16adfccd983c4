"""Packing of sequences of uneven length into micro batches of bounded size: pure functions.

A micro batch is one row of tokens: either its sequences one after the other, or the segments of
bundles, in which a shared prefix of sequences is stored once. The target of a position is the token
that the position predicts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from slipstream.learner.trainer.batches.images import ImageInputs
from slipstream.learner.trainer.batches.micro_batch import MicroBatch, Paths
from slipstream.learner.trainer.batches.planner import round_up
from slipstream.learner.trainer.batches.token_fields import TOKEN_FIELDS
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence


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
    return dataclasses.replace(packed, paths=_paths(bundles, packed.cu_seqlens.tolist()))


def _packed(
    sequences: Sequence[TrainingSequence],
    segments: Sequence[Segment],
    parts: Sequence[TrainingSequence],
    multiple: int,
) -> MicroBatch:
    """Joins `parts`, which are the tokens of `segments`, and filler into one micro batch.

    Filler makes the number of tokens divisible by `multiple`.
    """
    filler = _filler(multiple, sum(map(len, parts)), sequences)
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
    ids = np.repeat(np.array([part.algorithm for part in parts]), lengths)
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
        algorithm_ids=torch.from_numpy(ids) if ids.any() else None,
        images=ImageInputs.of(images, lengths.tolist()) if any(images) else None,
    )


def _filler(
    multiple: int, num_tokens: int, sequences: Sequence[TrainingSequence]
) -> list[TrainingSequence]:
    """Returns filler that makes the number of tokens, `num_tokens` so far, divisible by `multiple`.

    Returns [] if no filler is needed; 0 tokens get `multiple` tokens of filler. Filler has no loss,
    and the same fields as the first of `sequences`.
    """
    missing = round_up(max(1, num_tokens), multiple) - num_tokens
    if not missing:
        return []
    like = sequences[0] if sequences else TrainingSequence.of_tokens(np.zeros(0, dtype=np.uint32))
    fields: dict[str, Any] = {
        name: column.filled(missing, array)
        for name, column in TOKEN_FIELDS.items()
        if (array := getattr(like, name)) is not None
    }
    return [TrainingSequence(**fields)]


def _padded(sequence: TrainingSequence, multiple: int) -> TrainingSequence:
    missing = -len(sequence) % multiple
    if not missing:
        return sequence
    return sequence.map_fields(
        lambda array, column: np.concatenate([array, column.filled(missing, array)])
    )


def _cut(sequence: TrainingSequence, segment: Segment) -> TrainingSequence:
    return sequence.map_fields(lambda array, _: array[segment.start : segment.end])


def _paths(bundles: Sequence[Bundle], bounds: Sequence[int]) -> Paths:
    """Returns the keys of all segments of `bundles`, and of the filler after them.

    `bounds` is `cu_seqlens` of the micro batch: the start of each segment and of the filler, and
    the end of the last.
    """
    places: list[npt.NDArray[np.int64]] = []
    for bundle in bundles:
        first = len(places)
        for segment in bundle:
            own = np.arange(bounds[len(places)], bounds[len(places) + 1])
            before = [] if segment.parent is None else [places[first + segment.parent]]
            places.append(np.concatenate([*before, own]))
    if len(places) < len(bounds) - 1:
        places.append(np.arange(bounds[-2], bounds[-1]))
    return Paths.of(places, bounds[-1])
