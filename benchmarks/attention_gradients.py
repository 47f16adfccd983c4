"""Compares gradients of TransformerEngine's attention over packed sequences with float64, on a GPU.

Sizes of heads, with and without a window, and lengths of sequences take turns. Each batch is
computed three times, over memory that was full of 0, of NaN and of 30,000: what a kernel reads
without having written it shows. With CUDNN_HOME and LD_LIBRARY_PATH TransformerEngine takes another
cuDNN, as docs/guides/deployment.md says.

    python benchmarks/attention_gradients.py

Prints a line for each batch: the kernel, then the error of output, queries, keys and values for
each filling, as the norm of the difference over that of the right one, with the number of elements
that are not finite behind a "!".
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Heads, groups, dimensions of queries and keys, dimensions of values.
SIZES = (
    (16, 2, 256, 256),
    (8, 1, 256, 256),
    (16, 8, 128, 128),
    (32, 8, 64, 64),
    (16, 16, 192, 128),
    (16, 8, 96, 96),
)
WINDOWS = (0, 48)
FILLINGS = (0.0, float("nan"), 3e4)
KERNELS = ("flash", "fused", "unfused")
Lengths: TypeAlias = npt.NDArray[np.int64]


def batches(random: np.random.Generator) -> dict[str, Lengths]:
    """Returns lengths of sequences by name."""
    return {
        "short": random.integers(20, 100, 80),
        "tiny": random.integers(1, 20, 200),
        "long": random.integers(200, 1100, 8),
        "64s": np.array([64, 128, 192, 256, 64, 320]),
        "one": np.array([2048]),
    }


def fill_memory(value: float) -> None:
    """Leaves `value` in blocks of many sizes, which torch hands out again."""
    kept = [
        torch.full((size // 4,), value, device="cuda")
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
        for _ in range(40 if size < 1 << 28 else 24)
    ]
    torch.cuda.synchronize()
    del kept


def right(
    given: Sequence[Tensor], outer: Tensor, bounds: Sequence[int], window: int
) -> list[Tensor]:
    """Returns output and gradients of queries, keys and values [tokens, heads, size] in float64."""
    query, key, value = (tensor.detach().double().requires_grad_() for tensor in given)
    per_group, found = query.shape[1] // key.shape[1], []
    for start, end in pairwise(bounds):
        own = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
        queries, keys, values = own
        keys, values = (each.repeat_interleave(per_group, 0) for each in (keys, values))
        scores = queries @ keys.transpose(1, 2) * query.shape[2] ** -0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device="cuda").tril()
        if window:
            seen &= seen.triu(1 - window)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        found.append((weights @ values).transpose(0, 1))
    output = torch.cat(found)
    gradients = torch.autograd.grad(output, (query, key, value), outer.double().view_as(output))
    return [output.detach(), *gradients]


def error(found: Tensor, expected: Tensor) -> str:
    """Returns the relative error of what is finite, and how many elements are not."""
    found = found.double().reshape(expected.shape)
    not_finite = int((~torch.isfinite(found)).sum())
    off = float((torch.nan_to_num(found) - expected).norm() / expected.norm())
    return f"{off:.1e}" + (f"!{not_finite}" if not_finite else "")


def measure(sizes: tuple[int, int, int, int], lengths: Lengths, window: int) -> tuple[str, str]:
    """Returns the kernel and the errors of one batch, for each filling."""
    attention: Any = importlib.import_module("transformer_engine.pytorch").DotProductAttention
    name = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    heads, groups, size, value_size = sizes
    bounds = [0, *np.cumsum(lengths).tolist()]
    torch.manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(bounds[-1], *shape, device="cuda", dtype=torch.bfloat16)

    given = [drawn(heads, size), drawn(groups, size), drawn(groups, value_size)]
    given = [tensor.requires_grad_() for tensor in given]
    outer = drawn(heads * value_size)
    expected = right(given, outer, bounds, window)
    cu_seqlens, longest = torch.tensor(bounds, dtype=torch.int32, device="cuda"), int(lengths.max())
    layer = attention(
        heads,
        size if size == value_size else (size, value_size),
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        layer_number=1,
    )
    said = []
    for value in FILLINGS:
        if not value:
            torch.cuda.empty_cache()
        fill_memory(value)
        output = layer(
            *given,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            window_size=(window - 1, 0) if window else None,
        )
        found = output.detach(), *torch.autograd.grad(output, given, outer)
        said.append(" ".join(map(error, found, expected)))
    chosen = importlib.import_module(name)._attention_backends  # noqa: SLF001 - nothing else tells
    kernel = [kind for kind in KERNELS if chosen[f"use_{kind}_attention"]]
    return " ".join(kernel), " | ".join(said)


def main() -> None:
    """Measures all batches, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.parse_args()
    random = np.random.default_rng(0)
    for sizes in SIZES:
        heads, groups, size, value_size = sizes
        for window in WINDOWS:
            for name, lengths in batches(random).items():
                kernel, said = measure(sizes, lengths, window)
                shape = f"{heads}/{groups} heads of {size}/{value_size}"
                print(f"{shape}, window {window}, {name}, {kernel}: {said}", flush=True)
    utils = importlib.import_module("transformer_engine.pytorch.utils")
    print("cuDNN", *utils.get_cudnn_version(), flush=True)


if __name__ == "__main__":
    main()
