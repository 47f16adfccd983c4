"""ALP, a reward: tokens cost more, the easier the task is (arXiv:2506.05256)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from slipstream.learner.algorithms.episodes import RewardedEpisode


def reward(
    group: Sequence[RewardedEpisode],
    *,
    beta: Annotated[float, Field(ge=0)] = 0.1,
    solved_at: float = 1.0,
) -> list[float]:
    """Returns r - beta * max(p, 1 / K) * length / limit for each of the K episodes of a group.

    p is the share of episodes with a reward of at least `solved_at`, the length is that of all
    replies of an episode. The paper's constant N is here the limit of a reply.
    """
    solved = sum(episode.reward >= solved_at for episode in group)
    cost = beta * max(solved, 1) / len(group)
    return [e.reward - cost * sum(e.reply_tokens) / e.max_reply_tokens for e in group]
