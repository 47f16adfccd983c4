# ruff: noqa: ANN001, ANN202 - Triton compiles the kernels from the types of their arguments
"""Triton kernels that compute sums over the vocabulary and gradients of logits on a GPU.

The reference implementation is in `plain_logits`, which uses torch's operations. Each kernel takes
raw logits, neither divided by the temperature nor masked, reads them once, and allocates no memory.
Triton is installed only with torch's CUDA build, so import this module only there.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_WARPS = 8
# The same value as in `plain_logits`.
_PADDING_LOGIT = -1e30


def reduce(
    logits: Tensor, places: Tensor, num_tokens: int, temperature: float, sums: Sequence[Tensor]
) -> None:
    """Fills `sums` like `VocabularyShard.reduce` of logprobs.py, but from raw logits.

    `places` must be [rows]. The first `num_tokens` columns are tokens; the rest is padding, with
    probability 0.
    """
    _reduce_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        places,
        *sums,
        num_tokens,
        1.0 / temperature,
        PADDING=_PADDING_LOGIT,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def gradient(
    logits: Tensor,
    places: Tensor,
    columns: tuple[int, float],
    log_totals: Tensor,
    slopes: Tensor,
    bends: tuple[Tensor, Tensor] | None,
    grad: Tensor,
) -> None:
    """Writes into `grad` what `VocabularyShard.gradient` of logprobs.py gives, from raw logits.

    `places` must be [rows], and `columns` are the number of tokens and the temperature. `grad` may
    be `logits` itself, or a tensor of another type with the same strides.
    """
    bend, entropy = bends if bends is not None else (slopes, slopes)
    num_tokens, temperature = columns
    width = logits.shape[1]
    assert grad.stride() == logits.stride()
    _gradient_kernel[(len(logits), triton.cdiv(width, _BLOCK))](
        logits,
        grad,
        logits.stride(0),
        places,
        log_totals,
        slopes,
        bend,
        entropy,
        width,
        num_tokens,
        1.0 / temperature,
        HAS_BENDS=bends is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _reduce_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    places,
    peaks,
    totals,
    expected,
    wanted,
    num_tokens,
    scale,
    PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the `Sums` of one row; running sums are relative to the largest logit so far."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    peak = tl.full((), PADDING, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    mean = tl.full((), 0.0, tl.float32)
    for start in range(0, num_tokens, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_token = columns < num_tokens
        values = tl.load(base + columns, mask=is_token, other=0.0).to(tl.float32) * scale
        values = tl.where(is_token, values, PADDING)
        top = tl.maximum(peak, tl.max(values, axis=0))
        shift = peak - top
        shrink = tl.exp(shift)
        shifted = values - top
        exps = tl.exp(shifted)
        mean = (mean + shift * total) * shrink + tl.sum(exps * shifted, axis=0)
        total = total * shrink + tl.sum(exps, axis=0)
        peak = top
    place = tl.load(places + row)
    is_here = place >= 0
    target = tl.load(base + tl.maximum(place, 0), mask=is_here, other=0.0).to(tl.float32) * scale
    tl.store(peaks + row, peak)
    tl.store(totals + row, total)
    tl.store(expected + row, mean)
    tl.store(wanted + row, target)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    grads,
    stride,
    places,
    log_totals,
    slopes,
    bends,
    entropies,
    width,
    num_tokens,
    scale,
    HAS_BENDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the gradient of one block of columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offsets = row * stride + columns
    is_token = columns < num_tokens
    slope = tl.load(slopes + row)
    values = tl.load(logits + offsets, mask=is_token, other=0.0).to(tl.float32) * scale
    logprobs = values - tl.load(log_totals + row)
    factor = slope
    if HAS_BENDS:
        factor = slope + tl.load(bends + row) * (logprobs + tl.load(entropies + row))
    grad = -tl.exp(logprobs) * factor
    grad += tl.where(columns == tl.load(places + row), slope, 0.0)
    grad = tl.where(is_token, grad, 0.0)
    tl.store(grads + offsets, grad.to(grads.dtype.element_ty), mask=columns < width)
