"""Copies between fixed places, put together once and made in every pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

# Size from which a block is copied by itself: it takes longer than starting the next copy.
_LARGE_BYTES = 16 << 20
# A copy with gaps is split into at most this many contiguous blocks.
_MOST_BLOCKS = 64


class Copies:
    """Copies between fixed places, which may change the element type.

    On a GPU torch does a list of contiguous copies in a few kernels. One copy with gaps in that
    list makes it start a kernel for each copy. Those kernels reach two thirds of the speed of the
    GPU's own copy, which large blocks of one element type are copied by.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._dense: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._alone: list[tuple[Tensor, Tensor]] = []
        for target, source in pairs:
            blocks = list(dense_blocks(target, source))
            if not blocks:
                self._alone.append((target, source))
            for target_block, source_block in blocks:
                if target.dtype == source.dtype and target_block.nbytes >= _LARGE_BYTES:
                    self._alone.append((target_block, source_block))
                    continue
                self._dense[0].append(target_block)
                self._dense[1].append(source_block)

    def run(self) -> None:
        """Makes all copies, on the current stream."""
        if self._dense[0]:
            torch._foreach_copy_(*self._dense)
        for target, source in self._alone:
            target.copy_(source)


def dense_blocks(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Splits a copy into contiguous pieces; yields none when there would be too many.

    The heads of one group of queries lie together in a fused matrix: a few pieces for each layer.
    """
    if target.is_contiguous() and source.is_contiguous():
        yield target, source
    elif target.dim() > 1 and len(target) <= _MOST_BLOCKS:
        blocks = list(zip(target.unbind(), source.unbind(), strict=True))
        if all(t.is_contiguous() and s.is_contiguous() for t, s in blocks):
            yield from blocks
