"""The built-in functions that change the rewards of a group: pure functions."""

from collections.abc import Sequence

from slipstream.learner.algorithms.episodes import RewardedEpisode


def none(group: Sequence[RewardedEpisode]) -> list[float]:
    """Returns the environment's rewards unchanged."""
    return [episode.reward for episode in group]


def overlong(
    group: Sequence[RewardedEpisode], *, penalty: float = 1.0, cache_tokens: int
) -> list[float]:
    """Returns each reward less `penalty` times a share that grows with the episode's longest reply.

    The share is 0 up to `max_reply_tokens` - `cache_tokens` tokens, then rises linearly to 1 at
    `max_reply_tokens`. Source: the soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13).
    """
    rewards = []
    for episode in group:
        limit = episode.max_reply_tokens
        rising = min(cache_tokens, limit)
        over = max(episode.reply_tokens, default=0) - (limit - rising)
        rewards.append(episode.reward - penalty * min(max(over / rising, 0.0), 1.0))
    return rewards
