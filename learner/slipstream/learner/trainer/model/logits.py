"""Sums over the vocabulary and gradients of one chunk of logits, with torch's operations.

`fused_logits` does the same in one pass each on a GPU; this is its reference and what a CPU uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Far below every logit, and far enough from the smallest float that differences stay finite.
PADDING_LOGIT = -1e30


@dataclass(frozen=True)
class Columns:
    """What the columns of a chunk of logits are."""

    # The first so many are tokens; the rest is padding, which is never likely.
    num_tokens: int
    # By which logits are divided.
    temperature: float


class Sums(NamedTuple):
    """Of each row of logits, all [rows], written by `reduce`."""

    # The largest logit.
    peaks: Tensor
    # Sum of exp(logit - peak), and of the same times (logit - peak).
    totals: Tensor
    expected: Tensor
    # The target's logit; 0 where this rank does not have it.
    wanted: Tensor


def prepared(logits: Tensor, columns: Columns) -> Tensor:
    """Divided by the temperature, padding far below, at least in float32; `logits` are lost."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if columns.temperature != 1.0:
        logits /= columns.temperature
    logits[:, columns.num_tokens :] = PADDING_LOGIT
    return logits


def reduce(logits: Tensor, places: Tensor, sums: Sums) -> None:
    """Fills `sums` for prepared `logits` [rows, width].

    `places` [rows] are the columns of the targets, -1 where they are on another rank.
    """
    found = logits.gather(-1, places.clamp(min=0)[:, None]).squeeze(-1)
    sums.wanted.copy_(found * (places >= 0))
    torch.amax(logits, dim=-1, out=sums.peaks)
    shifted = logits - sums.peaks[:, None]
    exps = shifted.exp()
    torch.sum(exps, dim=-1, out=sums.totals)
    torch.sum(exps.mul_(shifted), dim=-1, out=sums.expected)


def gradient(
    logits: Tensor,
    places: Tensor,
    log_totals: Tensor,
    slopes: Tensor,
    bends: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The gradient of a sum over rows, [rows, width]; prepared `logits` are lost.

    The sum is of `slopes` * log-probability of the target, where it is here, and with `bends`,
    which are factors and entropies, of factor * entropy. Slopes and factors are already divided by
    the temperature.
    """
    logprobs = logits.sub_(log_totals[:, None])
    if bends is None:
        grad = logprobs.exp_().mul_(-slopes[:, None])
    else:
        factors, entropies = bends
        grad = logprobs.exp()
        weights = logprobs.add_(entropies[:, None]).mul_(factors[:, None]).add_(slopes[:, None])
        grad.mul_(weights).neg_()
    is_here = places >= 0
    return grad.scatter_add_(-1, places.clamp(min=0)[:, None], (slopes * is_here)[:, None])
