# ruff: noqa: ANN001, ANN202 - Triton compiles the kernel from the types of its arguments
"""A Triton kernel that sums the gradients of copied tokens: one pass, in a fixed order.

Triton is installed only with torch's CUDA build, so import this module only there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def sum_copies(grad: Tensor, copies: Tensor, bounds: Tensor) -> Tensor:
    """Returns for each token the sum of its copies' gradients, added in float32.

    `grad` is [copies, ...]. The copies of token t are `copies[bounds[t] : bounds[t + 1]]`.
    """
    grad = grad.contiguous()
    total = grad.new_empty((len(bounds) - 1, *grad.shape[1:]))
    width = total[0].numel()
    _sum_kernel[(len(total), triton.cdiv(width, _BLOCK))](
        grad, copies, bounds, total, width, BLOCK=_BLOCK
    )
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    grad, copies, bounds, total, width, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in range(tl.load(bounds + token), tl.load(bounds + token + 1)):
        copy = tl.load(copies + place)
        sums += tl.load(grad + copy * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + token * width + columns, sums.to(total.dtype.element_ty), mask=inside)
