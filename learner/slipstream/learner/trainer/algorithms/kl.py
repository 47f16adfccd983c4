"""Estimates of the divergence of two policies at sampled tokens, and log ratios."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0


def safe_ratio(log_ratio: Tensor) -> Tensor:
    """Returns the ratio from its logarithm, limited to -20 .. 20, so that products stay finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(
    policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator
) -> Tensor:
    """Estimates KL(policy || reference) at each token that the policy sampled, [tokens].

    With r = log reference - log policy, limited to -20 .. 20:
    - k1 = -r: its mean is the divergence. The mean of its gradient is 0 for every policy: good as a
     cost in the reward, useless in the loss;
    - k2 = r^2 / 2: slightly biased. The mean of its gradient is that of KL(policy || reference),
     the correct gradient for the loss;
    - k3 = exp(r) - 1 - r: its mean is the divergence, its variance small, never negative. The mean
     of its gradient is that of KL(reference || policy), which agrees near the reference; GRPO's
     choice (arXiv:2402.03300).
    Source: J. Schulman, "Approximating KL divergence" (2020); for the gradients "Rethinking KL
    regularization in RLHF" (arXiv:2510.01555).
    """
    log_ratio = (reference_logprobs - policy_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            # exp(r) - 1 would round the small difference away for a small r.
            return log_ratio.expm1() - log_ratio
