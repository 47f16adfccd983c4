"""The kernels against a softmax in float64, of the same logits."""

import pytest
import torch
from slipstream.learner.trainer.model.logprobs import (
    Projection,
    vocab_parallel_logprobs,
)
from torch import Tensor

TOKENS = 700
HIDDEN = 64
VOCAB = 32007
PADDED = 32064
TEMPERATURE = 0.7
Found = tuple[Tensor, Tensor, Tensor, Tensor]


def make_case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda").to(dtype)
    weight = (torch.randn(PADDED, HIDDEN, device="cuda") * 0.3).to(dtype)
    targets = torch.randint(VOCAB, (TOKENS,), device="cuda")
    targets[:4] = torch.tensor([0, VOCAB - 1, PADDED // 2 - 1, PADDED // 2])
    rows = torch.arange(TOKENS, device="cuda")[
        torch.randperm(TOKENS)[: TOKENS - 50].sort()[0]
    ]
    return (
        hidden,
        weight,
        targets,
        torch.cat([torch.arange(4, device="cuda"), rows[rows >= 4]]),
    )


def expected(case: tuple[Tensor, ...], outer: Tensor, bend: Tensor) -> Found:
    hidden, weight, targets, rows = case
    logits = (hidden[rows].double() @ weight[:VOCAB].double().T).requires_grad_()
    logs = (logits / TEMPERATURE).log_softmax(-1)
    logprobs = logs.gather(1, targets[rows, None])[:, 0]
    entropy = -(logs.exp() * logs).sum(-1)
    ((logprobs * outer[rows]).sum() + (entropy * bend[rows]).sum()).backward()
    assert logits.grad is not None
    states = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64, device="cuda")
    states[rows] = logits.grad @ weight[:VOCAB].double()
    weights = torch.zeros(PADDED, HIDDEN, dtype=torch.float64, device="cuda")
    weights[:VOCAB] = logits.grad.T @ hidden[rows].double()
    sums = torch.zeros(2, TOKENS, dtype=torch.float64, device="cuda")
    sums[0, rows], sums[1, rows] = logprobs.detach(), entropy.detach()
    return sums[0], sums[1], states, weights


@pytest.mark.parametrize("has_buffer", [False, True])
@pytest.mark.parametrize("kept_logits", [0, TOKENS * PADDED])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_a_softmax_in_float64(
    dtype: torch.dtype, entropy_gradient: bool, kept_logits: int, has_buffer: bool
) -> None:
    case = hidden, weight, targets, rows = make_case(dtype)
    outer, bend = torch.randn(2, TOKENS, device="cuda", dtype=torch.float64)
    if not entropy_gradient:
        bend = torch.zeros_like(bend)

    states = hidden.clone().requires_grad_()
    part = weight.clone().requires_grad_()
    if has_buffer:
        part.main_grad = torch.ones(PADDED, HIDDEN, device="cuda")
    projection = Projection(
        TEMPERATURE,
        VOCAB,
        entropy_gradient=entropy_gradient,
        chunk_logits=300 * PADDED,
        kept_logits=kept_logits,
    )
    logprobs, entropy = vocab_parallel_logprobs(states, part, targets, rows, projection)
    loss = (logprobs * outer).sum()
    if entropy_gradient:
        loss = loss + (entropy * bend).sum()
    loss.backward()
    expected_values = expected(case, outer, bend)
    torch.testing.assert_close(
        logprobs.double(), expected_values[0], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        entropy.double(), expected_values[1], rtol=1e-5, atol=1e-5
    )
    assert states.grad is not None
    assert part.grad is not None
    part_grad = part.main_grad - 1 if has_buffer else part.grad
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in (
        (states.grad, expected_values[2]),
        (part_grad, expected_values[3]),
    ):
        assert (ours.double() - theirs).norm() / theirs.norm() < limit
    assert not part_grad[VOCAB:].any()


def test_nothing_is_computed_where_nothing_is_trained() -> None:
    hidden, weight, targets, _ = make_case(torch.bfloat16)
    hidden.requires_grad_()
    nothing = torch.tensor([], dtype=torch.int64, device="cuda")
    logprobs, _ = vocab_parallel_logprobs(
        hidden, weight, targets, nothing, Projection(1.0, VOCAB)
    )
    logprobs.sum().backward()
    assert not logprobs.any()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_kept_logits_are_the_only_large_tensor() -> None:
    hidden, weight, targets, rows = make_case(torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    weight.main_grad = torch.zeros(weight.shape, device="cuda")
    projection = Projection(1.0, VOCAB, kept_logits=TOKENS * PADDED)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, _ = vocab_parallel_logprobs(hidden, weight, targets, rows, projection)
    logprobs.sum().backward()
    # Logits are float32, and their gradient is bfloat16.
    logits_bytes = 6 * len(rows) * PADDED
    weight_bytes = 2 * weight.numel()
    peak = torch.cuda.max_memory_allocated() - before
    assert logits_bytes <= peak < 1.1 * logits_bytes + 2 * weight_bytes + (8 << 20)
