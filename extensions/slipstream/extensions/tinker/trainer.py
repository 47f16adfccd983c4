"""Losses of the Tinker API that the learner does not have: pure functions of tokens."""

from slipstream.learner.algorithms.inputs import LossInputs
from slipstream.learner.algorithms.losses import safe_ratio
from torch import Tensor


def importance_sampling(tokens: LossInputs) -> Tensor:
    """Returns -ratio * A; the ratio is to the policy that sampled the token."""
    return -safe_ratio(tokens.logprobs - tokens.behavior_logprobs) * tokens.advantages


def dro(tokens: LossInputs, *, beta: float = 0.05) -> Tensor:
    """Returns -(log policy * A - beta / 2 * (log policy - log behavior)^2).

    Source: Direct Reward Optimisation (arXiv:2405.19107), without its value function.
    """
    log_ratio = tokens.logprobs - tokens.behavior_logprobs
    return -(tokens.logprobs * tokens.advantages - beta / 2 * log_ratio.square())
