"""The sides of episodes: each has a reward of its own, and is compared with itself in its group.

An episode has one side, unless its agent gave a named branch a reward of its own. For the
estimators each side is an episode, whose group are the same sides of the group's episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from slipstream.core.rewards import side_of
from slipstream.core.types import Trajectory
from slipstream.learner.trainer.algorithms.advantages import Episode, FloatArray, TokenAdvantages


@dataclass(frozen=True)
class Side:
    """The branches of one side of an episode, by their slices of its sampled tokens."""

    name: str
    sampled: tuple[slice, ...]

    def episode(
        self, group_id: str, reward: float, costs: FloatArray, values: FloatArray | None
    ) -> Episode:
        """Returns the side as an episode; `costs` and `values` are the whole episode's."""
        ends = np.cumsum([part.stop - part.start for part in self.sampled])
        return Episode(
            # A group's id has no space.
            f"{group_id} {self.name}" if self.name else group_id,
            reward,
            self._of(costs),
            None if values is None else self._of(values),
            tuple(
                slice(int(end) - (part.stop - part.start), int(end))
                for part, end in zip(self.sampled, ends, strict=True)
            ),
        )

    def _of(self, array: FloatArray) -> FloatArray:
        return np.concatenate([array[part] for part in self.sampled])


def sides_of(trajectory: Trajectory) -> list[Side]:
    """Returns the sides of an episode, in the order of their first branches."""
    slices: dict[str, list[slice]] = {}
    for part in trajectory.sequences():
        slices.setdefault(side_of(part.branch), []).append(part.sampled)
    return [Side(name, tuple(parts)) for name, parts in slices.items()]


def joined(sides: Sequence[tuple[Side, TokenAdvantages]], num_tokens: int) -> TokenAdvantages:
    """Returns the advantages of an episode's sampled tokens from those of its sides."""
    advantages = np.zeros(num_tokens)
    returns = None if sides[0][1].returns is None else np.zeros(num_tokens)
    for side, found in sides:
        start = 0
        for part in side.sampled:
            end = start + part.stop - part.start
            advantages[part] = found.advantages[start:end]
            if returns is not None and found.returns is not None:
                returns[part] = found.returns[start:end]
            start = end
    return TokenAdvantages(advantages, returns)
