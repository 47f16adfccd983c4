"""Products and norms on CPUs in which the bits of a row do not depend on the rows beside it.

With `algorithm.agreement = "bits"` learner and engine compute with these on CPUs: libraries add up
the numbers of a row in an order that depends on how many rows there are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of each product.
ROWS = 16


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `x` [..., in] times `weight` [out, in], plus the bias, in blocks of ROWS rows."""
    flat = x.reshape(-1, x.shape[-1])
    padded = F.pad(flat, (0, 0, 0, -len(flat) % ROWS))
    found = torch.cat([F.linear(rows, weight) for rows in torch.split(padded, ROWS)])[: len(flat)]
    if bias is not None:
        found = found + bias
    return found.view(*x.shape[:-1], len(weight))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `x` divided by the root of its mean square over the last dimension, times `weight`.

    The division is in float32, its result is rounded to the type of `x`.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
