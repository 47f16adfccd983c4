"""Changes of the published weights, and how much two of them are alike."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.weights.export import hf_tensors
from torch import Tensor

# By the names of published tensors.
Weights = Mapping[str, Tensor]


@torch.no_grad()
def host_weights(policy: Policy) -> Weights:
    """Returns a copy of all published weights in host memory on rank 0, nothing on other ranks.

    Collective. The products of adapters are merged, and the type is that of the publish: in
    bfloat16 a change that rounding takes away is none.
    """
    weights: dict[str, Tensor] = {}
    for name, weight in hf_tensors(policy, policy.dtype):
        if policy.ranks.is_main:
            weights[name] = weight.clone()
    return weights


@dataclass(frozen=True)
class WeightChange:
    """Weights before and after some training; both have the same names and shapes."""

    before: Weights
    after: Weights

    def of(self, name: str) -> Tensor:
        """Returns the change of one tensor in float64."""
        return self.after[name].double() - self.before[name].double()


@dataclass(frozen=True)
class ChangeLikeness:
    """Two changes of the same weights: the cosine between them, and the norm of each."""

    # NaN if one of the norms is 0.
    cosine: float
    norm: float
    original_norm: float

    @classmethod
    def between(cls, change: WeightChange, original: WeightChange) -> Self:
        """Compares two changes of the same tensors; without any, as on ranks but 0, norms are 0."""
        product = 0.0
        squares = 0.0
        original_squares = 0.0
        for name in change.after:
            difference = change.of(name)
            original_difference = original.of(name)
            product += float((difference * original_difference).sum())
            squares += float(difference.square().sum())
            original_squares += float(original_difference.square().sum())
        norm = math.sqrt(squares)
        original_norm = math.sqrt(original_squares)
        norms = norm * original_norm
        cosine = product / norms if norms else math.nan
        return cls(cosine, norm, original_norm)

    def __str__(self) -> str:
        cosine = "none" if math.isnan(self.cosine) else f"{self.cosine:.6f}"
        return f"cosine {cosine}, norm {self.norm:.3e} for {self.original_norm:.3e}"
