"""The scenes on which losses and weights are tested: a few tokens in several layouts.

A layout reorders the tokens of a scene, splits them into micro batches, pads them, or shares them
between simulated context parallel ranks, which compute one after another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from slipstream.extensions.proofs.proof import Disproved
from slipstream.learner.algorithms.inputs import LossInputs, SequenceSums
from torch import Tensor

FILLER = -1
# Indices of tokens, by micro batch and context parallel rank.
Layout = list[list[list[int]]]
# Sequences of scenes: x is a trained token, any other is not.
SEQUENCES = (("x",), ("x", ".x"), ("..xx", ".x.xx"), ("..xxx", "....", "x.xxxx.xx", ".xxxx"))
LONG = ("." * 200 + "x" * 4800, ".xxx")


class Inputs(NamedTuple):
    """The inputs of a function, and the tensors needed to take its gradient."""

    tokens: LossInputs
    # The leaf of the tokens' log-probabilities.
    leaf: Tensor
    # Weights of the tokens in the sum whose gradient is taken.
    shares: Tensor


@dataclass(frozen=True)
class Scene:
    """A few test sequences, whose token fields are random.

    In `sequences` the letter x is a trained token, any other letter is a masked token.
    """

    sequences: tuple[str, ...]
    has_reference: bool
    dtype: torch.dtype = torch.float64
    # Standard deviation of the log ratios. 0: the policy is that which sampled the tokens. From 1
    # on every third sequence is much nearer, and advantages are larger.
    spread: float = 0.3

    def __str__(self) -> str:
        shown = [one if len(one) < 20 else f"{one[:8]}...({len(one)})" for one in self.sequences]
        more = " ..." if len(shown) > 6 else ""
        wide = f", log ratios of deviation {self.spread:g}" if self.spread >= 1 else ""
        return f"sequences {' '.join(shown[:6])}{more} (x is a trained token){wide}"

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
        size = len(self.mask)
        chance = np.random.default_rng([0, size])
        logprobs = -0.2 - chance.exponential(1.0, size)
        gaps = chance.normal(0, self.spread, (2, size))
        if is_far := self.spread >= 1:
            gaps *= np.where(self.ids % 3 == 2, 0.1, 1.0)
        lags = chance.integers(0, 4, size, dtype=np.int32)
        is_given = (self.ids == 3).numpy()
        proximal = logprobs - gaps[0]
        found = {
            "logprobs": logprobs,
            "proximal_logprobs": proximal,
            "behavior_logprobs": np.where(is_given, proximal, proximal - gaps[1]),
            # No advantage is near 0, and both signs are there.
            "advantages": chance.uniform(0.3, 20.0 if is_far else 2.0, size)
            * (1 - 2 * (np.arange(size) % 2)),
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
        each = [torch.nonzero(self.ids == i)[:, 0].tolist() for i in range(len(self.sequences))]
        padded = [[*one, *[FILLER] * (-len(one) % 4)] for one in each]
        quarters = [(one, len(one) // 4) for one in padded]
        # Only the first sequence keeps the shared prefix; the others keep the tokens they train.
        own = [
            one[max(0, text.find("x")) :] for one, text in zip(each, self.sequences, strict=True)
        ]
        heads = [one[: len(one) // 2] for one in own[1:]]
        tails = [one[len(one) // 2 :] for one in own[1:]]
        return {
            "one micro batch": [[_joined(each)]],
            "order of episodes": [[_joined(each[::-1])]],
            "padding": [[[*_joined(padded), *[FILLER] * 3]]],
            "a micro batch for each sequence": [[one] for one in each],
            "two micro batches": [[_joined(each[i::2])] for i in (0, 1) if each[i::2]],
            "shared prefixes": [[_joined([each[0], *heads, *tails[::-1]])]],
            "cp 2": [
                [
                    _joined([*one[:n], *one[-n:]] for one, n in quarters),
                    _joined(one[n:-n] for one, n in quarters),
                ]
            ],
        }

    def inputs(
        self,
        places: Sequence[int] | None = None,
        changed: Mapping[str, Tensor] | None = None,
        sums: SequenceSums | None = None,
    ) -> Inputs:
        """Returns the inputs for the tokens at the indices `places`, by default all tokens.

        An index `FILLER` stands for padding. `changed` has fields, by name, that replace the
        scene's fields; `sums` replaces the sums over the chosen tokens.
        """
        chosen = torch.arange(len(self.mask)) if places is None else torch.tensor(places)
        fields = {
            name: torch.where(chosen == FILLER, torch.zeros((), dtype=values.dtype), values[chosen])
            for name, values in {**self.fields, "mask": self.mask, **(changed or {})}.items()
        }
        shares, reference = fields.pop("shares"), fields.pop("reference_logprobs")
        leaf = fields.pop("logprobs").clone().requires_grad_()
        tokens = LossInputs(
            # A function that changes a leaf in place would only raise.
            logprobs=leaf.clone(),
            reference_logprobs=reference if self.has_reference else None,
            sequences=sums or SequenceSums(*self.sums_arguments(chosen)),
            **fields,
        )
        return Inputs(tokens, leaf, shares)

    def sums_arguments(self, places: Tensor) -> tuple[Tensor, Tensor, int]:
        """Returns ids, mask and number of the sequences of the tokens at the indices `places`."""
        last = len(self.sequences)
        is_filler = places == FILLER
        ids = torch.where(is_filler, last, self.ids[places])
        return ids, self.mask[places] & ~is_filler, last + 1

    def values(
        self, layout: Layout, compute: Callable[[Inputs], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Returns the results of `compute` for all tokens, by name, in the scene's order of tokens.

        The micro batches of `layout` are computed one after another.
        """
        found: dict[str, Tensor] = {}
        for shares in layout:
            for places, own in zip(shares, self._of_ranks(shares, compute), strict=True):
                inside = torch.tensor(places) != FILLER
                for name, values in own.items():
                    whole = found.setdefault(name, torch.zeros(len(self.mask), dtype=values.dtype))
                    whole[torch.tensor(places)[inside]] = values[inside]
        return found

    def _of_ranks(
        self, shares: Sequence[Sequence[int]], compute: Callable[[Inputs], dict[str, Tensor]]
    ) -> list[dict[str, Tensor]]:
        """Returns the results of each rank; `shares` has the indices of each rank's tokens.

        Repeats the computation until all sums over ranks are known. Raises Disproved if the ranks
        request different numbers of sums.
        """
        known: list[Tensor] = []
        while True:
            sums = [_SharedSums(*self.sums_arguments(torch.tensor(one))) for one in shares]
            for each in sums:
                each.known = known
            results = [
                compute(self.inputs(places, sums=each))
                for places, each in zip(shares, sums, strict=True)
            ]
            asked = {len(each.parts) for each in sums}
            if len(asked) > 1:
                raise Disproved("one rank asks for sums over sequences, another does not")
            if asked == {len(known)}:
                return results
            known.append(torch.stack([each.parts[len(known)] for each in sums]).sum(0))


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


def _joined(parts: Iterable[Sequence[int]]) -> list[int]:
    return [*chain(*parts)]
