# ruff: noqa: ANN001, ANN202 - Triton compiles the kernels from the types of their arguments
"""Triton kernels that split, normalise and rotate attention's heads: one each way.

The projection of a token has its heads group by group: the queries of a group, its key, its value.
A program of either kernel takes all heads of a token at a time, and reads and writes each number
once. Triton is installed only with torch's CUDA build, so import this module only there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of a token's heads that one thread holds.
_OF_A_THREAD = 16
# Programs of the backward kernel for each multiprocessor: each sums its tokens' gradients of norms.
_PROGRAMS = 2


class Norms(NamedTuple):
    """RMSNorms of queries and keys: `offset` is added to the weights [head size]."""

    queries: Tensor
    keys: Tensor
    epsilon: float
    offset: float


def split(
    mixed: Tensor, positions: Tensor, turns: Tensor, norms: Norms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rotated queries [tokens, heads, head size] and keys, and values of each group.

    `mixed` is [tokens, groups, queries of a group + 2, head size]. `turns` has the cosine and the
    sine of each angle, float32 [2, positions, head size / 2]; `positions` are a token's rows of it.
    """
    tokens, groups, heads, size = mixed.shape
    queries = mixed.new_empty(tokens, groups * (heads - 2), size)
    keys, values = (mixed.new_empty(tokens, groups, size) for _ in range(2))
    weights = norms or Norms(mixed, mixed, 0.0, 0.0)
    if tokens:
        _split_kernel[(tokens,)](
            mixed,
            positions,
            *turns,
            weights.queries,
            weights.keys,
            queries,
            keys,
            values,
            weights.epsilon,
            weights.offset,
            **_constants(mixed, has_norms=norms is not None),
        )
    return queries, keys, values


def join(
    grads: tuple[Tensor, ...],
    positions: Tensor,
    turns: Tensor,
    normed: tuple[Tensor, Norms] | None,
    found: Tensor,
) -> Tensor:
    """Fills `found` with the gradient of `mixed`; returns the norms' weights': [2, head size].

    `grads` are those of the results of `split`, and `normed` has what it normed, `mixed`, and the
    norms; the other arguments are as there. The result is float32.
    """
    tokens = len(found)
    size = found.shape[-1]
    processors = torch.cuda.get_device_properties(found.device).multi_processor_count
    programs = min(tokens, _PROGRAMS * processors)
    sums = torch.zeros(
        programs,
        2,
        size,
        dtype=torch.float32,
        device=found.device,
    )
    mixed, weights = normed or (found, Norms(found, found, 0.0, 0.0))
    if tokens:
        _join_kernel[(programs,)](
            *(grad.contiguous() for grad in grads),
            mixed,
            positions,
            *turns,
            weights.queries,
            weights.keys,
            found,
            sums,
            tokens,
            programs,
            weights.epsilon,
            weights.offset,
            **_constants(found, has_norms=normed is not None),
        )
    return sums.sum(0)


def _constants(mixed: Tensor, *, has_norms: bool) -> dict[str, int]:
    _, groups, heads, size = mixed.shape
    block = triton.next_power_of_2(groups * heads)
    return {
        "GROUPS": groups,
        "HEADS": heads,
        "SIZE": size,
        "BLOCK": block,
        "HAS_NORMS": has_norms,
        "num_warps": min(max(block * size // (32 * _OF_A_THREAD), 1), 16),
    }


@triton.jit  # type: ignore[untyped-decorator]
def _halves(pointer, mask, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns both halves of heads, in float32; 0 outside of `mask`."""
    first = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(pointer + SIZE // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _store(pointer, first, second, mask, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(pointer, first.to(pointer.dtype.element_ty), mask=mask)
    tl.store(pointer + SIZE // 2, second.to(pointer.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(positions, cosines, sines, token, columns, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns cosines and sines of a token's angles, [1, SIZE / 2]."""
    place = tl.load(positions + token).to(tl.int64) * (SIZE // 2) + columns
    return tl.load(cosines + place), tl.load(sines + place)


@triton.jit
def _weights(query_weight, key_weight, is_query, offset, columns):  # type: ignore[no-untyped-def]
    """Returns the weights of each head's norm in `columns`."""
    of_query = tl.load(query_weight + columns).to(tl.float32)
    return tl.where(is_query, of_query, tl.load(key_weight + columns).to(tl.float32)) + offset


@triton.jit  # type: ignore[untyped-decorator]
def _scale(first, second, epsilon, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns what RMSNorm multiplies each head by, apart from weights."""
    squares = tl.sum(first * first, 1, keep_dims=True) + tl.sum(second * second, 1, keep_dims=True)
    return tl.rsqrt(squares / SIZE + epsilon)


@triton.jit  # type: ignore[untyped-decorator]
def _split_kernel(  # type: ignore[no-untyped-def]
    mixed,
    positions,
    cosines,
    sines,
    query_weight,
    key_weight,
    queries,
    keys,
    values,
    epsilon,
    offset,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    # A number is rotated with its partner in the other half of its head.
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE // 2)[None]
    rows = tl.arange(0, BLOCK)[:, None]
    inside = rows < GROUPS * HEADS
    head = rows % HEADS
    group = rows // HEADS
    is_query = inside & (head < HEADS - 2)
    is_key = inside & (head == HEADS - 2)
    is_value = inside & (head == HEADS - 1)
    at = mixed + (token * GROUPS * HEADS + rows) * SIZE + columns
    first, second = _halves(at, inside, SIZE)
    value = first
    other_value = second
    if HAS_NORMS:
        scale = _scale(first, second, epsilon, SIZE)
        first *= scale * _weights(query_weight, key_weight, is_query, offset, columns)
        second *= scale * _weights(query_weight, key_weight, is_query, offset, columns + SIZE // 2)
        # A norm of its own would round, as the engine's does.
        kind = mixed.dtype.element_ty
        first = first.to(kind).to(tl.float32)
        second = second.to(kind).to(tl.float32)
    cosine, sine = _turn(positions, cosines, sines, token, columns, SIZE)
    turned = first * cosine - second * sine
    other = second * cosine + first * sine
    at_query = ((token * GROUPS + group) * (HEADS - 2) + head) * SIZE + columns
    at_group = (token * GROUPS + group) * SIZE + columns
    _store(queries + at_query, turned, other, is_query, SIZE)
    _store(keys + at_group, turned, other, is_key, SIZE)
    _store(values + at_group, value, other_value, is_value, SIZE)


@triton.jit  # type: ignore[untyped-decorator]
def _join_kernel(  # type: ignore[no-untyped-def]
    query_grads,
    key_grads,
    value_grads,
    mixed,
    positions,
    cosines,
    sines,
    query_weight,
    key_weight,
    found,
    sums,
    tokens,
    programs,
    epsilon,
    offset,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, SIZE // 2)[None]
    rows = tl.arange(0, BLOCK)[:, None]
    inside = rows < GROUPS * HEADS
    head = rows % HEADS
    group = rows // HEADS
    is_query = inside & (head < HEADS - 2)
    is_key = inside & (head == HEADS - 2)
    is_value = inside & (head == HEADS - 1)
    if HAS_NORMS:
        weight = _weights(query_weight, key_weight, is_query, offset, columns)
        other_weight = _weights(query_weight, key_weight, is_query, offset, columns + SIZE // 2)
        # Gradients of the weights by head: a sum over heads would join all threads for each token.
        by_head = tl.zeros((BLOCK, SIZE // 2), tl.float32)
        others_by_head = tl.zeros((BLOCK, SIZE // 2), tl.float32)
    for number in range(tl.cdiv(tokens - program, programs)):
        token = (program + number * programs).to(tl.int64)
        at_query = ((token * GROUPS + group) * (HEADS - 2) + head) * SIZE + columns
        at_group = (token * GROUPS + group) * SIZE + columns
        # A head is one of the three, and 0 in the others.
        query, other_query = _halves(query_grads + at_query, is_query, SIZE)
        key, other_key = _halves(key_grads + at_group, is_key, SIZE)
        value, other_value = _halves(value_grads + at_group, is_value, SIZE)
        first = query + key
        second = other_query + other_key
        cosine, sine = _turn(positions, cosines, sines, token, columns, SIZE)
        back = first * cosine + second * sine
        other = second * cosine - first * sine
        place = (token * GROUPS * HEADS + rows) * SIZE + columns
        if HAS_NORMS:
            normed, other_normed = _halves(mixed + place, inside, SIZE)
            scale = _scale(normed, other_normed, epsilon, SIZE)
            normed *= scale
            other_normed *= scale
            by_head += back * normed
            others_by_head += other * other_normed
            back *= weight
            other *= other_weight
            along = tl.sum(back * normed, 1, keep_dims=True)
            along = (along + tl.sum(other * other_normed, 1, keep_dims=True)) / SIZE
            back = scale * (back - normed * along)
            other = scale * (other - other_normed * along)
        _store(found + place, back + value, other + other_value, inside, SIZE)
    if HAS_NORMS:
        to_sums = sums + program * 2 * SIZE + tl.arange(0, SIZE // 2)
        tl.store(to_sums, tl.sum(tl.where(is_query, by_head, 0.0), 0))
        tl.store(to_sums + SIZE // 2, tl.sum(tl.where(is_query, others_by_head, 0.0), 0))
        tl.store(to_sums + SIZE, tl.sum(tl.where(is_key, by_head, 0.0), 0))
        tl.store(to_sums + SIZE + SIZE // 2, tl.sum(tl.where(is_key, others_by_head, 0.0), 0))
