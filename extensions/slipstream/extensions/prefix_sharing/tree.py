"""Shared prefixes of sequences, which are computed only once: pure functions.

The members of a group begin with the same prompt, and branches of an episode with the same turns. A
*bundle* is a set of sequences that are cut into segments; a segment that several sequences share is
stored once. In attention a segment sees the segments on its path from the first token on.

Position i of a sequence predicts token i + 1. So a shared segment ends one token before the
sequences differ: each sequence keeps the last common token for its own prediction. A position that
more than one sequence trains is never shared.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from slipstream.learner.trainer.batches.micro_batch import Bundle, Segment
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence

_MANY = 2**63


class SavedWork(NamedTuple):
    """The work that shared prefixes save: tokens, and attention in the unit of `num_squares`."""

    tokens: int = 0
    squares: int = 0


def saved_by(
    sequences: Sequence[TrainingSequence], members: Sequence[int], made: Sequence[Bundle]
) -> SavedWork:
    """Returns the work that the bundles `made` save, compared with separate sequences.

    `members` are the indices of the sequences that are in the bundles.
    """
    lengths = [len(sequences[index]) for index in members]
    return SavedWork(
        sum(lengths) - sum(map(num_tokens, made)),
        sum(length**2 for length in lengths) - sum(map(num_squares, made)),
    )


def num_tokens(bundle: Bundle) -> int:
    """Returns the number of tokens of a bundle, shared tokens counted once."""
    return sum(map(len, bundle))


def num_squares(bundle: Bundle) -> int:
    """Returns the attention work of a bundle; the work of a single sequence of l tokens is l²."""
    return sum(segment.end**2 - segment.start**2 for segment in bundle)


class PrefixTree:
    """Sequences sorted so that sequences with a common prefix are neighbours.

    `members` are the indices of the sequences to use. A prefix shorter than `min_shared` tokens is
    not shared. The same sequences always give the same bundles.
    """

    def __init__(
        self, sequences: Sequence[TrainingSequence], members: Sequence[int], *, min_shared: int
    ) -> None:
        self._sequences, self._min_shared = sequences, min_shared
        keys = {index: sequences[index].token_ids.astype(">u4").tobytes() for index in members}
        order = sorted(members, key=lambda index: (keys[index], index))
        common = [_MANY]
        for one, other in itertools.pairwise(sequences[index].token_ids for index in order):
            length = min(len(one), len(other))
            differing = np.flatnonzero(one[:length] != other[:length])
            common.append(int(differing[0]) if len(differing) else length)
        self._runs = _Run(order, common[: len(order)]).cut(min_shared + 1)

    @property
    def share(self) -> bool:
        return any(len(run.indices) > 1 for run in self._runs)

    def bundles(self, max_tokens: int) -> list[Bundle]:
        """Returns bundles that cover all sequences.

        A bundle has at most `max_tokens` tokens, unless it has only one sequence.
        """
        found: list[Bundle] = []
        for run in self._runs:
            self._add_fitting(found, run, max_tokens)
        return found

    def _add_fitting(self, found: list[Bundle], run: _Run, max_tokens: int) -> None:
        """Adds the sequences of `run` to `found` as one bundle, or as several if it is too long."""
        bundle: Bundle = []
        self._add(bundle, run, 0, None)
        if num_tokens(bundle) <= max_tokens or len(run.indices) == 1:
            found.append(bundle)
            return
        middle = len(run.indices) // 2
        for half in (slice(None, middle), slice(middle, None)):
            self._add_fitting(found, _Run(run.indices[half], run.common[half]), max_tokens)

    def _add(self, bundle: Bundle, run: _Run, start: int, parent: int | None) -> None:
        """Adds segments for the positions of `run` from `start` on; all earlier tokens are equal.

        `parent` is the index of the segment that ends at `start`, or None.
        """
        if len(run.indices) == 1:
            (index,) = run.indices
            bundle.append(Segment(index, start, len(self._sequences[index]), parent))
            return
        trained = self._trained(run, start)
        end = min(min(run.common[1:]) - 1, trained[1][0])
        if end - start >= self._min_shared:
            bundle.append(Segment(trained[0][1], start, end, parent))
            start, parent = end, len(bundle) - 1
        parts = run.cut(start + self._min_shared + 1)
        if len(parts) == 1:
            # Several sequences train the next positions: only one of them shares with the sequences
            # that train none.
            near = start + self._min_shared
            rivals = [index for first, index in self._trained(run, start)[1:] if first < near]
            parts = [run.without(rivals), *(_Run([index], [0]) for index in rivals)]
        for part in parts:
            self._add(bundle, part, start, parent)

    def _trained(self, run: _Run, start: int) -> list[tuple[int, int]]:
        """Returns (first trained position from `start` on, index) of each sequence, sorted.

        For a sequence that trains no position from `start` on, the position is its length.
        """
        found = []
        for index in run.indices:
            mask = self._sequences[index].loss_mask
            places = np.flatnonzero(mask[start:])
            found.append((start + int(places[0]) if len(places) else len(mask), index))
        return sorted(found)


@dataclass(frozen=True)
class _Run:
    """Sequences sorted by their tokens, with the lengths of the prefixes that neighbours share.

    `common` has for each sequence the number of leading tokens that equal the previous sequence's;
    its first entry has no meaning.
    """

    indices: list[int]
    common: list[int]

    def cut(self, least: int) -> list[_Run]:
        """Cuts the run between neighbours that share fewer than `least` tokens; returns parts."""
        if not self.indices:
            return []
        cuts = [place for place in range(1, len(self.indices)) if self.common[place] < least]
        bounds = itertools.pairwise([0, *cuts, len(self.indices)])
        return [_Run(self.indices[one:end], self.common[one:end]) for one, end in bounds]

    def without(self, leaving: Collection[int]) -> _Run:
        """Returns the run without the sequences `leaving`."""
        indices, common, least = [], [], _MANY
        for index, number in zip(self.indices, self.common, strict=True):
            least = min(least, number)
            if index not in leaving:
                indices.append(index)
                common.append(least)
                least = _MANY
        return _Run(indices, common)
