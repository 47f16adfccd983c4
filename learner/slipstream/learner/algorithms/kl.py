"""Estimates of the KL divergence of two policies at sampled tokens, and bounded ratios."""

import torch
from slipstream.core.settings.algorithm_section import KlEstimator
from torch import Tensor

MAX_LOG_RATIO = 20.0
# Lower bound of the probability of all other tokens: float32 cannot resolve much smaller ones.
MIN_REST = 1e-6


def safe_ratio(log_ratio: Tensor) -> Tensor:
    """Returns exp(`log_ratio`); clamps `log_ratio` to -20 .. 20 so that products stay finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(
    policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator
) -> Tensor:
    """Estimates KL(policy || reference) at each token that the policy sampled, [tokens].

    With r = log reference - log policy, limited to -20 .. 20:
    - k1 = -r is unbiased, but the mean of its gradient is 0 for every policy. So it suits a cost in
     the reward, but is useless in the loss.
    - k2 = r^2 / 2 is slightly biased, but the mean of its gradient is the gradient of
     KL(policy || reference), which is correct for the loss.
    - k3 = exp(r) - 1 - r is unbiased, never negative and has a small variance. The mean of its
     gradient is the gradient of KL(reference || policy), which agrees near the reference. GRPO
     (arXiv:2402.03300) uses k3.
    Raises ValueError for a top-k estimator. Source: J. Schulman, "Approximating KL divergence"
    (2020); for the gradients "Rethinking KL regularization in RLHF" (arXiv:2510.01555).
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
        case "forward_top_k" | "reverse_top_k":
            raise ValueError(f"{estimator} is no estimate at a sampled token")


def top_k_divergence(
    policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator
) -> Tensor:
    """Returns the divergence at each position over the reference's most likely tokens, [tokens].

    Both arguments are [tokens, top k]: log-probabilities of the same tokens in the whole
    vocabulary. All other tokens count as one token, whose probability is at least `MIN_REST`. So
    the value is at most the divergence over the vocabulary, and 0 where the policy and the
    reference agree. With p the policy and q the reference:
    - forward_top_k = KL(q || p), the sum of q * (log q - log p);
    - reverse_top_k = KL(p || q), the sum of p * (log p - log q).
    Log ratios are clamped to -20 .. 20.
    """
    policy, reference = _with_rest(policy_logprobs), _with_rest(reference_logprobs)
    log_ratio = (reference - policy).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "forward_top_k":
        return (reference.exp() * log_ratio).sum(-1)
    assert estimator == "reverse_top_k", estimator
    return -(policy.exp() * log_ratio).sum(-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Appends the log-probability of all other tokens together, as one more column."""
    rest = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=MIN_REST)
    return torch.cat([logprobs, rest.log()], dim=-1)
