"""Log-probabilities over kept tokens on a GPU, by the fused kernels, beside float64."""

import pytest
import torch

ROWS = 512
HIDDEN = 256
VOCABULARY = 40_000
KEPT = 20


@pytest.mark.parametrize(
    ("temperature", "has_entropy_gradient"),
    [
        (1.0, False),
        (0.7, True),
    ],
)
def test_probabilities_and_gradients_are_over_kept_tokens(
    temperature: float,
    has_entropy_gradient: bool,
) -> None:
    # Triton comes with torch's CUDA build alone.
    from slipstream.learner.trainer.model.logprobs import (
        Projection,
        vocab_parallel_logprobs,
    )

    torch.manual_seed(0)
    device = torch.device("cuda")
    hidden = torch.randn(ROWS, HIDDEN, device=device)
    hidden = hidden.bfloat16().requires_grad_()
    weight = 0.1 * torch.randn(VOCABULARY, HIDDEN, device=device)
    weight = weight.bfloat16().requires_grad_()
    noise = torch.rand(ROWS, VOCABULARY, device=device)
    ids = noise.topk(KEPT, dim=1).indices
    targets = ids[:, 0].clone()
    is_kept = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool, device=device)
    is_kept.scatter_(1, ids, True)
    sorted_ids = ids.sort(dim=1).values
    kept_ids = (sorted_ids + 1).int()
    # Every fifth token was drawn from all.
    kept_ids[::5] = 0
    is_kept[::5] = True
    projection = Projection(
        temperature,
        VOCABULARY,
        entropy_gradient=has_entropy_gradient,
        chunk_logits=100 * VOCABULARY,
    )
    logprobs, entropies = vocab_parallel_logprobs(
        hidden,
        weight,
        targets,
        torch.arange(ROWS, device=device),
        projection,
        kept_ids=kept_ids,
    )

    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    logits = exact_hidden @ exact_weight.T / temperature
    every_logprob = logits.masked_fill(~is_kept, -1e300).log_softmax(1)
    columns = targets[:, None]
    exact_logprobs = every_logprob.gather(1, columns)[:, 0]
    surprises = -every_logprob.masked_fill(~is_kept, 0.0)
    exact_entropies = (every_logprob.exp() * surprises).sum(1)
    torch.testing.assert_close(logprobs.double(), exact_logprobs, atol=2e-5, rtol=0)
    torch.testing.assert_close(entropies.double(), exact_entropies, atol=2e-5, rtol=0)

    slopes = torch.linspace(-1, 1, ROWS, dtype=torch.float64, device=device)
    total = slopes @ logprobs.double()
    exact_total = slopes @ exact_logprobs
    if has_entropy_gradient:
        entropy_slopes = slopes.flip(0)
        total = total + entropy_slopes @ entropies.double()
        exact_total = exact_total + entropy_slopes @ exact_entropies
    gradients = torch.autograd.grad(total, (hidden, weight))
    exact_gradients = torch.autograd.grad(exact_total, (exact_hidden, exact_weight))
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        difference = gradient.double() - exact_gradient
        assert difference.norm() < 5e-3 * exact_gradient.norm()
