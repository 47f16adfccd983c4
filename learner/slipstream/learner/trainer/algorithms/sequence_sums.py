"""Sums over the sequences of a packed micro batch, whose tokens several ranks may share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from torch import Tensor


class SequenceSums:
    """Sums and means over the trained tokens of each sequence; collective over `group`.

    `group` has the context parallel ranks that share the sequences; None if sequences are not
    shared. Sums carry no gradient: the loss uses ratios, weights, masks and lengths of whole
    sequences as constants.
    """

    def __init__(self, micro_batch: MicroBatch, group: dist.ProcessGroup | None) -> None:
        self._ids = micro_batch.sequence_ids
        self._mask = micro_batch.loss_mask
        self._number = len(micro_batch.indices) + 1
        self._group = group if group is not None and group.size() > 1 else None

    def sums(self, values: Tensor) -> Tensor:
        """Returns for each token the sum over its sequence, [tokens]; 0 without a trained token."""
        sums = self._sums(values)
        return sums[self._ids].to(values.dtype)

    def means(self, values: Tensor) -> Tensor:
        """Returns for each token its sequence's mean, [tokens]; 0 without a trained token."""
        means = self._sums(values) / self._sums(self._mask).clamp(min=1)
        return means[self._ids].to(values.dtype)

    @torch.no_grad()
    def _sums(self, values: Tensor) -> Tensor:
        # float64 keeps the order of additions over ranks and tokens from changing a float32 result.
        trained = torch.where(self._mask, values, 0).to(torch.float64)
        sums = torch.zeros(self._number, dtype=torch.float64, device=values.device)
        sums.index_add_(0, self._ids, trained)
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        return sums
