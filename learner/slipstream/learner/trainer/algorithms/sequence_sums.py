"""Sums over the sequences of a packed micro batch, wherever their tokens lie."""

from __future__ import annotations

import torch
import torch.distributed as dist
from slipstream.learner.trainer.batches.packing import MicroBatch
from torch import Tensor


class SequenceSums:
    """Sums and means over the trained tokens of each sequence; collective over `group`.

    `group` are the context parallel ranks that share the sequences, None when there are none. Sums
    carry no gradient: ratios, weights, masks and lengths of whole sequences are constants where the
    loss uses them.
    """

    def __init__(self, micro_batch: MicroBatch, group: dist.ProcessGroup | None) -> None:
        self._ids = micro_batch.sequence_ids
        self._mask = micro_batch.loss_mask
        self._number = len(micro_batch.indices) + 1
        self._group = group if group is not None and group.size() > 1 else None

    def sums(self, values: Tensor) -> Tensor:
        """For each token the sum over its sequence, [tokens]; 0 without a trained token."""
        sums = self._sums(values)
        return sums[self._ids].to(values.dtype)

    def means(self, values: Tensor) -> Tensor:
        """For each token the mean over its sequence, [tokens]; 0 without a trained token."""
        means = self._sums(values) / self._sums(self._mask).clamp(min=1)
        return means[self._ids].to(values.dtype)

    @torch.no_grad()
    def _sums(self, values: Tensor) -> Tensor:
        # float64: the order in which ranks and tokens add up shall not show in float32.
        trained = torch.where(self._mask, values, 0).to(torch.float64)
        sums = torch.zeros(self._number, dtype=torch.float64, device=values.device)
        sums.index_add_(0, self._ids, trained)
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        return sums
