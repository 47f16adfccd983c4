"""Batch-invariant matrix products and RMS norms on CPUs: a row's bits do not depend on other rows.

With `algorithm.agreement = "bits"`, learner and engine use these functions on CPUs. The usual
libraries sum over a row in an order that depends on the number of rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Number of rows in each block of a product.
ROWS = 16


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `x` [..., in] times the transposed `weight` [out, in], plus `bias` [out].

    The product is computed in blocks of `ROWS` rows.
    """
    flat = x.reshape(-1, x.shape[-1])
    padded = F.pad(flat, (0, 0, 0, -len(flat) % ROWS))
    blocks = [F.linear(rows, weight) for rows in torch.split(padded, ROWS)]
    products = torch.cat(blocks)[: len(flat)]
    if bias is not None:
        products = products + bias
    return products.view(*x.shape[:-1], len(weight))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMS norm of `x` over its last dimension, times `weight`.

    `x` is normalized in float32 and rounded to its own type before the product with `weight`.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
