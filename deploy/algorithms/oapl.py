"""OAPL, a loss and its advantage: log ratios are fitted to optimal advantages (arXiv:2602.19362).

The policy that maximises reward - beta * KL(policy || behavior policy) has the log ratio A / beta,
with A the reward less the value beta * ln of the mean of exp(reward / beta). So replies of any age
are fitted by squares, and no ratio corrects: `weight` must be "none".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from slipstream.learner.algorithms.episodes import FloatArray, ScoredEpisode
from slipstream.learner.algorithms.inputs import LossInputs

Beta = Annotated[float, Field(gt=0)]


def loss(tokens: LossInputs, *, beta: Beta = 1.0) -> torch.Tensor:
    """Returns a sequence's share of (beta * ln(policy / behavior policy) - A)^2 at each token.

    The tokens of a sequence have equal shares of its square, and each the gradient by its own
    log-probability. `aggregation = "fixed"` then gives the sum over sequences, as in the paper.
    """
    sequences = tokens.sequences
    log_ratios = tokens.logprobs - tokens.behavior_logprobs
    ones = torch.ones_like(log_ratios)
    lengths = sequences.sums(ones).clamp(min=1)
    log_ratio = sequences.sums(log_ratios)
    difference = beta * log_ratio - tokens.advantages
    # The change is 0, with the gradient of the token's log-probability.
    change = log_ratios - log_ratios.detach()
    shares = difference.square() / lengths
    slopes = 2 * beta * difference
    return shares + slopes * change


def advantage(episodes: Sequence[ScoredEpisode], *, beta: Beta = 1.0) -> FloatArray:
    """Returns each reward less beta * ln of its group's mean of exp(reward / beta)."""
    group_ids = np.array([episode.group_id for episode in episodes])
    scores = [episode.reward - episode.token_costs.sum() for episode in episodes]
    rewards = np.array(scores, dtype=np.float64)
    values = np.zeros_like(rewards)
    for group_id in np.unique(group_ids):
        members = group_ids == group_id
        group_rewards = rewards[members]
        largest = group_rewards.max()
        # Differences from the largest reward cannot overflow.
        differences = group_rewards - largest
        mean = np.exp(differences / beta).mean()
        values[members] = largest + beta * np.log(mean)
    return rewards - values
