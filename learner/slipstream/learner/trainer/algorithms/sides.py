"""The sides of an episode: each is an episode for the estimators of advantages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from slipstream.core.types import Trajectory
from slipstream.learner.algorithms.episodes import FloatArray, ScoredEpisode, TokenAdvantages
from slipstream.learner.algorithms.groups import side_of


@dataclass(frozen=True)
class Side:
    """The branches of one side of an episode, which is an episode for the estimators.

    A side has a reward of its own, and is compared with the same side of its group's episodes. An
    episode has one side, unless its agent gave a named branch a reward of its own.
    """

    name: str
    # Places of its tokens among the episode's sampled tokens.
    places: npt.NDArray[np.int64]
    # The tokens of each branch among `places`.
    branches: tuple[slice, ...]

    def episode(
        self,
        trajectory: Trajectory,
        reward: float,
        costs: FloatArray,
        values: FloatArray | None,
        lags: npt.NDArray[np.int32],
    ) -> ScoredEpisode:
        """Returns the side as an episode; arrays are the whole episode's."""
        group_id = trajectory.group_id
        return ScoredEpisode(
            # A group's id has no space.
            f"{group_id} {self.name}" if self.name else group_id,
            reward,
            costs[self.places],
            None if values is None else values[self.places],
            self.branches,
            trajectory.metrics,
            lags[self.places],
        )


def sides_of(trajectory: Trajectory) -> list[Side]:
    """Returns the sides of an episode, in the order of their first branches."""
    places: dict[str, list[npt.NDArray[np.int64]]] = {}
    for part in trajectory.sequences():
        own = np.arange(part.sampled.start, part.sampled.stop)
        places.setdefault(side_of(part.branch), []).append(own)
    return [
        Side(name, np.concatenate(parts), tuple(itertools.starmap(slice, _bounds(parts))))
        for name, parts in places.items()
    ]


def joined(sides: Sequence[tuple[Side, TokenAdvantages]], num_tokens: int) -> TokenAdvantages:
    """Returns the advantages of an episode's sampled tokens from those of its sides."""
    advantages = np.zeros(num_tokens)
    returns = None if sides[0][1].returns is None else np.zeros(num_tokens)
    for side, found in sides:
        advantages[side.places] = found.advantages
        if returns is not None and found.returns is not None:
            returns[side.places] = found.returns
    return TokenAdvantages(advantages, returns)


def _bounds(parts: Sequence[Sized]) -> Iterator[tuple[int, int]]:
    """Returns start and end of each of the joined parts."""
    return itertools.pairwise([0, *itertools.accumulate(map(len, parts))])
