"""Sums over the vocabulary and gradients of one chunk of logits, with torch's operations.

`fused_logits` computes the same on a GPU, with one kernel for each function. This module is the
reference implementation; it also serves CPUs and several targets per row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Far below every logit, and far enough from the smallest float that differences stay finite.
PADDING_LOGIT = -1e30


@dataclass(frozen=True)
class LogitColumns:
    """The parameters of a chunk of logits: padding and temperature."""

    # The first `num_tokens` columns are tokens; the rest is padding, with probability 0.
    num_tokens: int
    # Divisor of the logits.
    temperature: float


class Sums(NamedTuple):
    """Sums over the vocabulary for each row of logits, written by `reduce`."""

    # The largest logit.
    peaks: Tensor
    # Sum of exp(logit - peak), and of exp(logit - peak) * (logit - peak).
    totals: Tensor
    expected: Tensor
    # The logits of the targets, [rows] or [rows, targets]; 0 where this rank does not have one.
    wanted: Tensor


def prepared(logits: Tensor, columns: LogitColumns) -> Tensor:
    """Returns logits divided by the temperature, at least float32, with padding columns masked.

    `logits` may be overwritten.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if columns.temperature != 1.0:
        logits /= columns.temperature
    logits[:, columns.num_tokens :] = PADDING_LOGIT
    return logits


def reduce(logits: Tensor, places: Tensor, sums: Sums) -> None:
    """Fills `sums` for prepared `logits` [rows, width].

    `places` [rows] or [rows, targets] are the columns of the targets, -1 where they are on another
    rank.
    """
    found = logits.gather(-1, _rows(places).clamp(min=0)).view_as(places)
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
    """Returns the gradient [rows, width] of a loss with respect to the logits.

    The loss is the sum of slope * log-probability over all targets and, with `bends`, of factor *
    entropy over all rows. `logits` come from `prepared` and are overwritten, but the gradient is
    with respect to the logits before the division by the temperature: slopes and factors must
    already be divided by it. `slopes` and `places` are [rows] or [rows, targets]; the place of a
    target on another rank is -1. `bends` are the factors and the entropies, and `log_totals` the
    logarithms of the sums of exp(logit), each [rows].
    """
    logprobs = logits.sub_(log_totals[:, None])
    total = _rows(slopes).sum(-1, keepdim=True)
    if bends is None:
        grad = logprobs.exp_().mul_(-total)
    else:
        factors, entropies = bends
        grad = logprobs.exp()
        weights = logprobs.add_(entropies[:, None]).mul_(factors[:, None]).add_(total)
        grad.mul_(weights).neg_()
    here = slopes * (places >= 0)
    return grad.scatter_add_(-1, _rows(places).clamp(min=0), _rows(here))


def _rows(values: Tensor) -> Tensor:
    """Returns `values`, which are [rows] or [rows, targets], as [rows, targets]."""
    return values if values.dim() > 1 else values[:, None]
