import math

import pytest
import torch
from slipstream.learner.algorithms.kl import kl_estimate, safe_ratio, top_k_divergence

ESTIMATORS = ("k1", "k2", "k3")


def test_k3_of_policies_that_hardly_differ_is_not_lost_in_rounding() -> None:
    policy = torch.linspace(-3.0, -0.5, 100)
    reference = policy + 1e-4
    # r^2 / 2 + r^3 / 6, of what the numbers really are apart.
    log_ratio = (reference - policy).double()
    expected = log_ratio.square() / 2 + log_ratio**3 / 6
    found = kl_estimate(policy, reference, "k3")
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=0.0)
    assert (found > 0).all()


def softmax_policies() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    return logits, reference


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(value, logits)
    return found


def mean_estimate(logits: torch.Tensor, reference: torch.Tensor, estimator) -> torch.Tensor:
    """Over all tokens that the policy may sample, each as often as it does; exact."""
    policy = logits.log_softmax(-1)
    return (policy.detach().exp() * kl_estimate(policy, reference, estimator)).sum()


def test_means_of_k1_and_k3_are_the_divergence() -> None:
    logits, reference = softmax_policies()
    policy = logits.log_softmax(-1)
    divergence = (policy.exp() * (policy - reference)).sum().item()
    assert mean_estimate(logits, reference, "k1").item() == pytest.approx(divergence)
    assert mean_estimate(logits, reference, "k3").item() == pytest.approx(divergence)


def test_mean_gradient_of_k1_in_the_loss_is_nothing() -> None:
    logits, reference = softmax_policies()
    found = gradient(mean_estimate(logits, reference, "k1"), logits)
    assert found.tolist() == pytest.approx([0.0] * 6, abs=1e-12)


def test_mean_gradient_of_k2_in_the_loss_is_that_of_the_divergence_from_the_reference() -> None:
    logits, reference = softmax_policies()
    policy = logits.log_softmax(-1)
    expected = gradient((policy.exp() * (policy - reference)).sum(), logits)
    found = gradient(mean_estimate(logits, reference, "k2"), logits)
    torch.testing.assert_close(found, expected)


def test_mean_gradient_of_k3_in_the_loss_is_that_of_the_opposite_divergence() -> None:
    logits, reference = softmax_policies()
    policy = logits.log_softmax(-1)
    expected = gradient((reference.exp() * (reference - policy)).sum(), logits)
    found = gradient(mean_estimate(logits, reference, "k3"), logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("delta", [-1e3, 1e3])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_log_ratios_of_any_size_give_finite_estimates(estimator, delta: float) -> None:
    policy = torch.tensor([delta], requires_grad=True)
    found = kl_estimate(policy, torch.zeros(1), estimator)
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert policy.grad is not None
    assert torch.isfinite(policy.grad).all()


def test_ratio_is_limited_to_twenty_on_either_side() -> None:
    found = safe_ratio(torch.tensor([-1e3, 0.0, 1e3]))
    assert found.tolist() == pytest.approx([math.exp(-20), 1.0, math.exp(20)])
    assert torch.isfinite(found * found).all()


def test_the_divergence_over_likely_tokens_by_hand() -> None:
    # The policy gives 0.5 and 0.25, the reference 0.25 and 0.25; 0.25 and 0.5 are left.
    policy = torch.tensor([[0.5, 0.25]]).log()
    reference = torch.tensor([[0.25, 0.25]]).log()
    forward = top_k_divergence(policy, reference, "forward_top_k")
    assert forward.item() == pytest.approx(-0.25 * math.log(2) + 0.5 * math.log(2), rel=1e-5)
    reverse = top_k_divergence(policy, reference, "reverse_top_k")
    assert reverse.item() == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2), rel=1e-5)


@pytest.mark.parametrize("estimator", ["forward_top_k", "reverse_top_k"])
def test_all_tokens_but_one_give_the_divergence_of_the_whole_vocabulary(estimator) -> None:
    logits, reference = softmax_policies()
    policy = logits.log_softmax(-1)
    found = top_k_divergence(policy[None, :-1], reference[None, :-1], estimator)
    one, other = (reference, policy) if estimator == "forward_top_k" else (policy, reference)
    expected = (one.exp() * (one - other)).sum()
    assert found.item() == pytest.approx(expected.item(), abs=1e-9)
    (ours,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
    torch.testing.assert_close(ours, gradient(expected, logits))


@pytest.mark.parametrize("estimator", ["forward_top_k", "reverse_top_k"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_fewer_likely_tokens_give_less_of_the_divergence_and_none_where_both_agree(k, estimator):
    logits, reference = softmax_policies()
    policy = logits.log_softmax(-1).detach()
    whole = top_k_divergence(policy[None, :-1], reference[None, :-1], estimator).item()
    ids = reference.topk(k).indices
    found = top_k_divergence(policy[None, ids], reference[None, ids], estimator).item()
    assert -1e-9 <= found <= whole + 1e-9
    assert top_k_divergence(reference[None, ids], reference[None, ids], estimator).item() == 0.0


@pytest.mark.parametrize("estimator", ["forward_top_k", "reverse_top_k"])
def test_certain_policies_and_references_give_finite_divergences_and_gradients(estimator) -> None:
    for policy, reference in ([0.0, -60.0], [-0.7, -0.7]), ([-40.0, -50.0], [0.0, -9999.0]):
        values = torch.tensor([policy], requires_grad=True)
        found = top_k_divergence(values, torch.tensor([reference]), estimator)
        assert found.isfinite().all()
        assert gradient(found.sum(), values).isfinite().all()
