"""GiGPO, an advantage: turns are compared where they met one state too (arXiv:2505.10978)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field
from slipstream.learner.algorithms.advantages import dr_grpo, grpo
from slipstream.learner.algorithms.episodes import FloatArray, ScoredEpisode


def advantage(
    episodes: Sequence[ScoredEpisode],
    *,
    omega: Annotated[float, Field(ge=0)] = 1.0,
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95,
    by_deviation: bool = True,
) -> list[FloatArray]:
    """Returns A_E + omega * A_S for the tokens of each turn.

    A_E compares the reward of the episode with those of its group. A_S compares the discounted
    return of the turn with those of all turns of the group at the same anchor state: what the
    model read since the reply before. Both are (x - mean) / deviation, or x - mean.
    """
    compared = grpo if by_deviation else dr_grpo
    states = dict[tuple[str, bytes], str]()
    steps: list[ScoredEpisode] = []
    found = [
        np.full(len(e.token_costs), a) for e, a in zip(episodes, compared(episodes), strict=True)
    ]
    for episode in episodes:
        returns = episode.returns(gamma)
        for turn in episode.turns:
            state = (episode.group_id, turn.context.tobytes())
            name = states.setdefault(state, str(len(states)))
            steps.append(ScoredEpisode(name, returns[turn.span.start], np.zeros(0)))
    of_turns = iter(compared(steps))
    for episode, advantages in zip(episodes, found, strict=True):
        for turn in episode.turns:
            advantages[turn.span] += omega * next(of_turns)
    return found
