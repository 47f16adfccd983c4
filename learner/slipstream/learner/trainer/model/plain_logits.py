"""Sums over a vocabulary and gradients of its logits, by torch's operations.

A vocabulary is all tokens of a rank, or the tokens that one token was drawn from. On a GPU
`fused_logits` computes the same for a whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Far below every logit, and far enough from the smallest float that differences stay finite.
PADDING_LOGIT = -1e30


class Sums(NamedTuple):
    """Sums over the vocabulary for each row of logits, written by `plain_reduce` or a kernel."""

    # The largest logit.
    peaks: Tensor
    # Sum of exp(logit - peak), and of exp(logit - peak) * (logit - peak).
    totals: Tensor
    expected: Tensor
    # The logits of the targets, [rows] or [rows, targets]; 0 where this rank does not have one.
    target_logits: Tensor


@dataclass(frozen=True)
class SetLogits:
    """The logits of the tokens that sampled tokens were drawn from: a vocabulary for each row.

    `values` are divided by the temperature, [rows, largest set], and `columns` their places in this
    rank's logits; -1, with `PADDING_LOGIT`, where a set is smaller or a token is on another rank.
    `places` are those of the targets among the columns, [rows] or [rows, targets], or -1. Rows
    without `has_set` keep all tokens, and nothing here is about them.
    """

    values: Tensor
    columns: Tensor
    places: Tensor
    has_set: Tensor

    def without_rows(self, values: Tensor, filling: float) -> Tensor:
        """Returns `values` [rows] or [rows, targets] with `filling` in the rows that have a set."""
        has_set = self.has_set
        if values.dim() > 1:
            has_set = has_set[:, None]
        return values.masked_fill(has_set, filling)

    def reduce(self, sums: Sums) -> None:
        """Overwrites the `sums` of rows that have a set, but for the target's logits."""
        kept_sums = Sums(*map(torch.empty_like, sums))
        plain_reduce(self.values, self.places, kept_sums)
        for name in ("peaks", "totals", "expected"):
            row_sums = getattr(sums, name)
            set_sums = getattr(kept_sums, name)
            torch.where(self.has_set, set_sums, row_sums, out=row_sums)

    def write_gradient(
        self,
        grad: Tensor,
        log_totals: Tensor,
        slopes: Tensor,
        bends: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Writes the gradient of rows that have a set into `grad` [rows, width], which is 0 there.

        Overwrites `values`; the other arguments are those of `VocabularyShard.gradient`.
        """
        kept_grad = plain_gradient(self.values, self.places, log_totals, slopes, bends)
        kept_grad = kept_grad.to(grad.dtype)
        # A column that is not here repeats the last one of its row, so that all writes agree.
        last_columns, last = self.columns.max(dim=1, keepdim=True)
        is_here = self.columns >= 0
        last_columns = last_columns.clamp(min=0)
        columns = torch.where(is_here, self.columns, last_columns)
        last_grad = kept_grad.gather(1, last)
        kept_grad = torch.where(is_here, kept_grad, last_grad)
        row_grad = grad.gather(1, columns)
        has_set = self.has_set[:, None]
        grad.scatter_(1, columns, torch.where(has_set, kept_grad, row_grad))


def plain_reduce(logits: Tensor, places: Tensor, sums: Sums) -> None:
    """Fills `sums` for `logits` [rows, width] with torch's operations.

    The logits are divided by the temperature. `places` are the columns of the targets, [rows] or
    [rows, targets], or -1.
    """
    target_columns = as_rows(places).clamp(min=0)
    target_logits = logits.gather(-1, target_columns)
    is_here = places >= 0
    sums.target_logits.copy_(target_logits.view_as(places) * is_here)
    torch.amax(logits, dim=-1, out=sums.peaks)
    shifted = logits - sums.peaks[:, None]
    exps = shifted.exp()
    torch.sum(exps, dim=-1, out=sums.totals)
    weighted = exps.mul_(shifted)
    torch.sum(weighted, dim=-1, out=sums.expected)


def plain_gradient(
    logits: Tensor,
    places: Tensor,
    log_totals: Tensor,
    slopes: Tensor,
    bends: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Returns `VocabularyShard.gradient` with torch's operations; overwrites `logits`."""
    logprobs = logits.sub_(log_totals[:, None])
    slope_sum = as_rows(slopes).sum(-1, keepdim=True)
    if bends is None:
        grad = logprobs.exp_().mul_(-slope_sum)
    else:
        factors, entropies = bends
        grad = logprobs.exp()
        weights = logprobs.add_(entropies[:, None])
        weights.mul_(factors[:, None])
        weights.add_(slope_sum)
        grad.mul_(weights).neg_()
    is_here = places >= 0
    local_slopes = slopes * is_here
    target_columns = as_rows(places).clamp(min=0)
    return grad.scatter_add_(-1, target_columns, as_rows(local_slopes))


def as_rows(values: Tensor) -> Tensor:
    """Returns `values`, which are [rows] or [rows, targets], as [rows, targets]."""
    return values if values.dim() > 1 else values[:, None]
