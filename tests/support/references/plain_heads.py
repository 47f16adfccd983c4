"""What the kernels of attention's heads compute, in torch's operations."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

KERNELS = "slipstream.learner.trainer.layers.head_kernels"


class Norms(NamedTuple):
    queries: Tensor
    keys: Tensor
    epsilon: float
    offset: float


def split(
    mixed: Tensor, positions: Tensor, turns: Tensor, norms: Norms | None
) -> tuple[Tensor, Tensor, Tensor]:
    queries = mixed[:, :, :-2].flatten(1, 2)
    keys = mixed[:, :, -2]
    values = mixed[:, :, -1]
    if norms is not None:
        queries, keys = (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + norms.epsilon)
            * (w + norms.offset)
            for x, w in ((queries, norms.queries), (keys, norms.keys))
        )
    cosine, sine = turns[:, positions].to(mixed.dtype)[:, :, None].repeat(1, 1, 1, 2)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cosine + torch.cat([-second, first], dim=-1) * sine

    return rotated(queries), rotated(keys), values.clone()


def join(
    grads: tuple[Tensor, ...],
    positions: Tensor,
    turns: Tensor,
    normed: tuple[Tensor, Norms] | None,
    found: Tensor,
) -> Tensor:
    with torch.enable_grad():
        if normed is None:
            # The gradient depends on no number.
            mixed = torch.zeros_like(found).requires_grad_()
            outputs = split(mixed, positions, turns, None)
            found.copy_(torch.autograd.grad(outputs, mixed, grads)[0])
            return torch.zeros(2, found.shape[-1])
        mixed = normed[0].detach().requires_grad_()
        norms = normed[1]
        weights = [norm.detach().requires_grad_() for norm in norms[:2]]
        outputs = split(mixed, positions, turns, Norms(*weights, *norms[2:]))
        grad, *sums = torch.autograd.grad(outputs, [mixed, *weights], grads)
    found.copy_(grad)
    return torch.stack(sums)


@contextmanager
def in_place_of_kernels() -> Iterator[None]:
    """All models that are opened meanwhile have the attention of `heads`, with these functions."""
    from slipstream.learner.trainer.ranks import compat

    compat.install()
    from slipstream.learner.trainer.layers import heads

    module = ModuleType(KERNELS)
    real = heads.are_plain
    calls = list[int]()

    def counted(mixed: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(len(mixed))
        return split(mixed, *rest)

    vars(module).update(Norms=Norms, split=counted, join=join)
    sys.modules[KERNELS] = module
    heads.are_plain = lambda config: True
    yield
    assert calls, "attention did not ask for its heads"
    del sys.modules[KERNELS]
    heads.are_plain = real
