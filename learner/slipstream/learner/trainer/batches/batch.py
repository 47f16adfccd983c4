"""The trajectories of one training step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from slipstream.core.errors import RunFailed
from slipstream.core.types import Trajectory
from slipstream.v1 import trainer_pb2


@dataclass(frozen=True)
class Batch:
    """Trajectories of whole groups, in order, that train version `step` into version `step` + 1.

    A trajectory is trained as one sequence, or as one for each of its branches, in the order of
    their tokens.
    """

    step: int
    batch_id: str
    trajectories: tuple[Trajectory, ...]
    # What a client asks of the step, and the passes whose gradients it takes, in place of
    # trajectories.
    given: trainer_pb2.GivenStep | None = None
    passes: tuple[trainer_pb2.Pass, ...] = ()

    @property
    def group_ids(self) -> list[str]:
        return [trajectory.group_id for trajectory in self.trajectories]

    @functools.cached_property
    def owners(self) -> list[int]:
        return [index for index, t in enumerate(self.trajectories) for _ in t.sequences()]

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence."""
        parts = [part.tokens for t in self.trajectories for part in t.sequences()]
        return [tokens.stop - tokens.start for tokens in parts]

    @property
    def unrecorded_fraction(self) -> float:
        """The fraction of tokens whose experts the engine did not record.

        The last token of each sequence is left out: it predicts nothing, so engines do not compute
        it.
        """
        recorded, total = 0, 0
        for trajectory in self.trajectories:
            routed = trajectory.routed_experts
            is_recorded = None if routed is None else routed.is_recorded
            for part in trajectory.sequences():
                total += max(0, part.tokens.stop - part.tokens.start - 1)
                if is_recorded is not None:
                    recorded += int(np.count_nonzero(is_recorded[part.tokens][:-1]))
        return 1.0 - recorded / total if total else 1.0

    def by_adapter(self, names: Sequence[str]) -> list[tuple[str, Batch]]:
        """Returns (name, batch) for each adapter that has trajectories, in the order of `names`.

        Raises RunFailed for a trajectory whose adapter is not among `names`.
        """
        for trajectory in self.trajectories:
            if trajectory.adapter not in names:
                raise RunFailed(
                    f"batch {self.batch_id}: {trajectory.trajectory_id} is of adapter "
                    f"{trajectory.adapter!r}, but lora.adapters are {', '.join(names)!r}"
                )
        parts = [(n, tuple(t for t in self.trajectories if t.adapter == n)) for n in names]
        return [(name, replace(self, trajectories=part)) for name, part in parts if part]

    def mini_batches(self, number: int, *, or_fewer: bool = False) -> list[list[int]]:
        """Returns the indices of each mini-batch's sequences: about equal shares of the groups.

        If there are fewer groups than `number`, with `or_fewer` each group is a mini-batch. Without
        `or_fewer` RunFailed is raised.
        """
        groups = list(dict.fromkeys(self.group_ids))
        if or_fewer:
            number = min(number, len(groups))
        if len(groups) < number:
            raise RunFailed(
                f"batch {self.batch_id}: {len(groups)} groups are too few for {number} mini-batches"
            )
        share = {group: place * number // len(groups) for place, group in enumerate(groups)}
        parts: list[list[int]] = [[] for _ in range(number)]
        group_ids = self.group_ids
        for index, owner in enumerate(self.owners):
            parts[share[group_ids[owner]]].append(index)
        return parts
