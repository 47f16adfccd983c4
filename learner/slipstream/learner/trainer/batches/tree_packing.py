"""Packing of bundles, which share the common beginnings of sequences: pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from slipstream.learner.trainer.batches.micro_batch import MicroBatch, Paths
from slipstream.learner.trainer.batches.packing import filler_to, joined
from slipstream.learner.trainer.batches.prefix_tree import Bundle, Segment
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence


def build_tree_micro_batch(
    sequences: Sequence[TrainingSequence], bundles: Sequence[Bundle], *, multiple: int = 1
) -> MicroBatch:
    """Packs the segments of `bundles`, and filler up to a multiple of `multiple` tokens.

    Positions count from the beginning of a sequence, and the target of a segment's last position is
    the next token of its sequence. `indices` has each sequence once.
    """
    segments = [segment for bundle in bundles for segment in bundle]
    place_of: dict[int, int] = {}
    for segment in segments:
        place_of.setdefault(segment.index, len(place_of))
    owners = [place_of[segment.index] for segment in segments]
    parts = [_part(sequences[segment.index], segment) for segment in segments]
    filler = filler_to(multiple, sum(map(len, parts)), sequences)
    targets = [_targets(sequences[segment.index], segment) for segment in segments]
    packed = joined(
        [*parts, *filler],
        targets=np.concatenate([*targets, *(one.token_ids for one in filler)]),
        starts=[*(segment.start for segment in segments), *(0 for _ in filler)],
        places=[*owners, *(len(place_of) for _ in filler)],
        indices=list(place_of),
    )
    return dataclasses.replace(packed, paths=_paths(bundles, packed.cu_seqlens.tolist()))


def _part(sequence: TrainingSequence, segment: Segment) -> TrainingSequence:
    return sequence.map_fields(lambda array, _: array[segment.start : segment.end])


def _targets(sequence: TrainingSequence, segment: Segment) -> npt.NDArray[np.int64]:
    """Returns the token after each position, 0 after the last one of the sequence."""
    found = np.zeros(len(segment), dtype=np.int64)
    following = sequence.token_ids[segment.start + 1 : segment.end + 1]
    found[: len(following)] = following
    return found


def _paths(bundles: Sequence[Bundle], bounds: Sequence[int]) -> Paths:
    """Returns the keys of all segments, and of filler, whose tokens lie between `bounds`."""
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
