"""The scenes on which losses and weights are tested: a few tokens in several layouts.

A layout reorders the tokens of a scene, splits them into micro batches, pads them, or shares them
between simulated context parallel ranks, which compute one after another.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from slipstream.core.errors import RunFailed
from slipstream.learner.algorithms.inputs import LossInputs, SequenceSums
from torch import Tensor

FILLER = -1
# Indices of tokens, by micro batch and context parallel rank.
Layout = list[list[list[int]]]


class Disproved(RunFailed):
    """Raised when a property does not hold; its text is an example that shows it."""


class Inputs(NamedTuple):
    """The inputs of a function, and the tensors needed to take its gradient."""

    tokens: LossInputs
    # The leaf of the tokens' log-probabilities.
    leaf: Tensor
    # Weights of the tokens in the sum whose gradient is taken.
    shares: Tensor


Compute = Callable[[Inputs], dict[str, Tensor]]
NOTHING: Mapping[str, Tensor] = {}


@dataclass(frozen=True)
class Scene:
    """A few test sequences, whose token fields are random, seeded by `seed`.

    In `sequences` the letter x is a trained token, any other letter is a masked token.
    """

    sequences: tuple[str, ...]
    has_reference: bool
    seed: int = 0
    dtype: torch.dtype = torch.float64
    # Whether the policy has not changed since the tokens were sampled.
    is_on_policy: bool = False

    def __str__(self) -> str:
        shown, more = self.sequences[:6], " ..." if len(self.sequences) > 6 else ""
        return f"sequences {' '.join(shown)}{more} (x is a trained token)"

    @functools.cached_property
    def mask(self) -> Tensor:
        """The mask of the trained tokens, bool [tokens]."""
        return torch.tensor([letter == "x" for one in self.sequences for letter in one])

    @functools.cached_property
    def ids(self) -> Tensor:
        """The index of each token's sequence, [tokens]."""
        return torch.tensor([i for i, one in enumerate(self.sequences) for _ in one])

    @functools.cached_property
    def fields(self) -> dict[str, Tensor]:
        """The values of all tokens by field name, such as `logprobs` or `advantages`.

        Each tensor is [tokens]. Masked tokens have values of the same range as trained ones.
        """
        chance = np.random.default_rng([self.seed, len(self.mask)])
        size = len(self.mask)
        logprobs = -0.2 - chance.exponential(1.0, size)
        gaps = np.zeros((2, size)) if self.is_on_policy else chance.normal(0, 0.3, (2, size))
        lags = chance.integers(0, 4, size, dtype=np.int32)
        is_given = (self.ids == 3).numpy()
        proximal = logprobs - gaps[0]
        found = {
            "logprobs": logprobs,
            "proximal_logprobs": proximal,
            "behavior_logprobs": np.where(is_given, proximal, proximal - gaps[1]),
            # No advantage is near 0, and both signs are there.
            "advantages": chance.uniform(0.3, 2.0, size) * (1 - 2 * (np.arange(size) % 2)),
            "reference_logprobs": logprobs + chance.normal(0, 0.4, size),
            "entropy": chance.uniform(0.1, 2.0, size),
            # Weights of the tokens in the sum whose gradient is taken.
            "shares": chance.uniform(0.5, 1.5, size),
        }
        floats = {name: torch.from_numpy(values).to(self.dtype) for name, values in found.items()}
        whole = {"is_given": is_given, "lags": lags, "versions": 10 - lags}
        return floats | {name: torch.from_numpy(values) for name, values in whole.items()}

    def layouts(self) -> dict[str, Layout]:
        """Returns layouts by name; the first has all sequences in one micro batch on one rank."""
        each = [
            torch.nonzero(self.ids == index)[:, 0].tolist() for index in range(len(self.sequences))
        ]
        padded = [[*one, *[FILLER] * (-len(one) % 4)] for one in each]
        size = [len(one) // 4 for one in padded]
        cut = [
            [one[i * n : (i + 1) * n] for i in range(4)]
            for one, n in zip(padded, size, strict=True)
        ]
        first = [[*one[0], *one[3]] for one in cut]
        second = [[*one[1], *one[2]] for one in cut]
        # Only the first sequence keeps the shared prefix; the others keep the tokens they train.
        shared = [one[max(0, self.sequences[i].find("x")) :] for i, one in enumerate(each) if i]
        heads = [one[: len(one) // 2] for one in shared]
        tails = [one[len(one) // 2 :] for one in shared]
        mixed = [*each[0], *itertools.chain(*heads), *itertools.chain(*tails[::-1])]
        return {
            "one micro batch": [[list(itertools.chain(*each))]],
            "order of episodes": [[list(itertools.chain(*each[::-1]))]],
            "padding": [[[*itertools.chain(*padded), *[FILLER] * 3]]],
            "a micro batch for each sequence": [[one] for one in each],
            "two micro batches": [[list(itertools.chain(*each[i::2]))] for i in (0, 1)],
            "shared prefixes": [[mixed]],
            "cp 2": [[list(itertools.chain(*first)), list(itertools.chain(*second))]],
        }


class _SharedSums(SequenceSums):
    """Simulates `SequenceSums` over context parallel ranks, which compute one after another.

    `known` has the sums over all ranks that are known so far, in call order. A call beyond these
    returns only this rank's part.
    """

    known: Sequence[Tensor] = ()

    def _sums(self, values: Tensor) -> Tensor:
        place = len(self.parts)
        self.parts.append(super()._sums(values))
        return self.known[place] if place < len(self.known) else self.parts[place]

    @functools.cached_property
    def parts(self) -> list[Tensor]:
        """This rank's part of each sum that the function has requested so far."""
        return []


def values_of(scene: Scene, layout: Layout, compute: Compute) -> dict[str, Tensor]:
    """Returns the results of `compute` for all tokens, by name, in the scene's order of tokens.

    The micro batches of `layout` are computed one after another.
    """
    found: dict[str, Tensor] = {}
    for shares in layout:
        if any(shares):
            for places, own in zip(shares, _of_ranks(scene, shares, compute), strict=True):
                inside = torch.tensor(places) != FILLER
                for name, values in own.items():
                    whole = found.setdefault(name, torch.zeros(len(scene.mask), dtype=values.dtype))
                    whole[torch.tensor(places)[inside]] = values[inside]
    return found


def _of_ranks(
    scene: Scene, shares: Sequence[Sequence[int]], compute: Compute
) -> list[dict[str, Tensor]]:
    """Returns the results of each rank; `shares` has the indices of each rank's tokens.

    Repeats the computation until all sums over ranks are known. Raises Disproved if the ranks
    request different numbers of sums.
    """
    known: list[Tensor] = []
    while True:
        sums = [_SharedSums(*_sums_arguments(scene, places)) for places in shares]
        for one in sums:
            one.known = known
        results = [
            compute(inputs_of(scene, places, sums=one))
            for places, one in zip(shares, sums, strict=True)
        ]
        asked = {len(one.parts) for one in sums}
        if len(asked) > 1:
            raise Disproved("one rank asks for sums over sequences, another does not")
        if asked == {len(known)}:
            return results
        known.append(torch.stack([one.parts[len(known)] for one in sums]).sum(0))


def at(values: Tensor, places: Sequence[int]) -> Tensor:
    """Returns the values at the indices `places`, with 0 where an index is `FILLER`."""
    chosen = torch.tensor(places, dtype=torch.int64)
    return torch.where(chosen == FILLER, torch.zeros((), dtype=values.dtype), values[chosen])


def _sums_arguments(scene: Scene, places: Sequence[int]) -> tuple[Tensor, Tensor, int]:
    chosen, last = torch.tensor(places, dtype=torch.int64), len(scene.sequences)
    ids = torch.where(chosen == FILLER, last, scene.ids[chosen])
    return ids, at(scene.mask, places), last + 1


def inputs_of(
    scene: Scene,
    places: Sequence[int] | None = None,
    changed: Mapping[str, Tensor] = NOTHING,
    *,
    sums: SequenceSums | None = None,
) -> Inputs:
    """Returns the inputs for the tokens at the indices `places`, by default all tokens.

    `changed` has fields, by name, that replace the scene's fields; `sums` replaces the sums over
    the chosen tokens.
    """
    places = range(len(scene.mask)) if places is None else places
    fields = {name: at(values, places) for name, values in {**scene.fields, **changed}.items()}
    shares = fields.pop("shares")
    leaf = fields.pop("logprobs").clone().requires_grad_()
    arguments = _sums_arguments(scene, places)
    reference = fields.pop("reference_logprobs")
    tokens = LossInputs(
        # A function that changes a leaf in place would only raise.
        logprobs=leaf.clone(),
        mask=arguments[1],
        reference_logprobs=reference if scene.has_reference else None,
        sequences=sums or SequenceSums(*arguments),
        **fields,
    )
    return Inputs(tokens, leaf, shares)
