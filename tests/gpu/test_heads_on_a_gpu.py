"""The kernels of attention's heads beside float64."""

import pytest
import torch
from support.references import plain_heads
from torch import Tensor

LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
POSITIONS = 40_000


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("tokens", "groups", "queries", "size", "dtype", "offset"),
    [
        (1, 1, 1, 128, torch.bfloat16, None),
        (301, 8, 2, 128, torch.bfloat16, 0.0),
        (3001, 8, 4, 128, torch.bfloat16, 0.0),
        (133, 1, 8, 256, torch.float16, 1.0),
        (2000, 5, 3, 64, torch.bfloat16, None),
        (901, 3, 5, 32, torch.float32, 0.0),
        (700, 2, 2, 16, torch.bfloat16, 0.0),
        (17, 8, 16, 128, torch.bfloat16, 0.0),
        (0, 8, 2, 128, torch.bfloat16, 0.0),
    ],
)
def test_heads_and_their_gradients_are_those_of_float64(
    tokens: int,
    groups: int,
    queries: int,
    size: int,
    dtype: torch.dtype,
    offset: float | None,
) -> None:
    # Triton comes with torch's CUDA build alone.
    from slipstream.learner.trainer.layers.head_kernels import Norms, join, split

    torch.manual_seed(tokens)
    mixed = torch.randn(tokens, groups, queries + 2, size, device="cuda").to(dtype)
    positions = torch.randint(POSITIONS, (tokens,), device="cuda")
    angles = torch.outer(
        torch.arange(POSITIONS), 1e6 ** (-torch.arange(0, size, 2) / size)
    ).cuda()
    turns = torch.stack((angles.cos(), angles.sin()))
    norms = plain = None
    if offset is not None:
        weights = [torch.randn(size, device="cuda").to(dtype) for _ in range(2)]
        norms = Norms(*weights, 1e-6, offset)
        plain = plain_heads.Norms(
            *(weights.double() for weights in weights), 1e-6, offset
        )
    # A value that is not written would be NaN.
    waste = [torch.full_like(mixed, torch.nan) for _ in range(4)]
    del waste
    outputs = split(mixed, positions, turns, norms)
    grads = tuple(torch.randn_like(output) for output in outputs)
    grad = torch.full_like(mixed, torch.nan)
    sums = join(
        grads, positions, turns, None if norms is None else (mixed, norms), grad
    )
    assert all(part.is_contiguous() for part in outputs)
    if not tokens:
        assert not sums.any()
        return
    exact = mixed.double()
    limit = LIMITS[dtype]
    expected = plain_heads.split(exact, positions, turns.double(), plain)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert error(ours, theirs) < limit
    wide = tuple(grad.double() for grad in grads)
    expected_grad = torch.empty_like(exact)
    normed = None if plain is None else (exact, plain)
    weights_wanted = plain_heads.join(
        wide, positions, turns.double(), normed, expected_grad
    )
    assert error(grad, expected_grad) < limit
    if norms is not None:
        assert error(sums, weights_wanted) < 1e-5
