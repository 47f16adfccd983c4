"""The trajectories of one step, and checks of their data with equal results on every rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from slipstream.core.errors import RunFailed, StalenessError, UntrainableBatch
from slipstream.core.staleness import lag
from slipstream.core.types import Trajectory
from slipstream.learner.trainer.batches.planner import round_up

MAX_TOLD = 3
LagArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """Trajectories that train version `step` into version `step` + 1: whole groups, in order.

    A trajectory is trained as one sequence, or as one for each of its branches, in the order of
    their tokens.
    """

    step: int
    batch_id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def group_ids(self) -> list[str]:
        """The group id of each trajectory."""
        return [trajectory.group_id for trajectory in self.trajectories]

    @functools.cached_property
    def owners(self) -> list[int]:
        """The index of the trajectory that each sequence belongs to."""
        return [index for index, t in enumerate(self.trajectories) for _ in t.sequences()]

    def lengths(self) -> list[int]:
        """The number of tokens of each sequence."""
        parts = [part.tokens for t in self.trajectories for part in t.sequences()]
        return [tokens.stop - tokens.start for tokens in parts]

    def rewards(self) -> npt.NDArray[np.float64]:
        """The reward of each trajectory."""
        return np.array([t.reward for t in self.trajectories], dtype=np.float64)

    def check(self, max_staleness: int) -> None:
        """Raises StalenessError for a lag not in 0..`max_staleness`.

        Raises UntrainableBatch for a trajectory without a reward.
        """
        for trajectory in self.trajectories:
            for span in trajectory.version_spans:
                found = lag(self.step, span.version.step)
                if span.length and not 0 <= found <= max_staleness:
                    raise StalenessError(
                        f"step {self.step + 1}: {trajectory.trajectory_id} has tokens of version "
                        f"{span.version}, a lag of {found}, but it must be between 0 and "
                        f"max_staleness {max_staleness}"
                    )
        for trajectory in self.trajectories:
            if not trajectory.has_reward:
                raise UntrainableBatch(
                    f"batch {self.batch_id}: {trajectory.trajectory_id} is "
                    f"{trajectory.status.name}, it has no reward",
                    [trajectory.trajectory_id],
                )

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

    def mini_batches(self, number: int) -> list[list[int]]:
        """Returns each mini-batch's indices of sequences: equal shares of the groups, in order.

        Raises RunFailed if there are fewer groups than mini-batches.
        """
        groups = list(dict.fromkeys(self.group_ids))
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


def token_lags(trajectories: Sequence[Trajectory], step: int) -> LagArray:
    """Returns the lag of each sampled token, one array over all trajectories in order."""
    spans = [span for trajectory in trajectories for span in trajectory.version_spans]
    return np.repeat(
        np.array([lag(step, span.version.step) for span in spans], dtype=np.int32),
        np.array([span.length for span in spans], dtype=np.int64),
    )


def untrainable(batch: Batch, indices: Sequence[int], cause: str) -> UntrainableBatch:
    """Returns the error with text `cause` for the trajectories of the sequences at `indices`.

    The text ends with the ids of the first few of these trajectories.
    """
    owners = dict.fromkeys(batch.owners[index] for index in indices)
    ids = [batch.trajectories[owner].trajectory_id for owner in owners]
    more = f" and {len(ids) - MAX_TOLD} more" if len(ids) > MAX_TOLD else ""
    told = f" ({', '.join(ids[:MAX_TOLD])}{more})" if ids else ""
    return UntrainableBatch(f"{cause}{told}", ids)


def check_data(batch: Batch, *, max_tokens: int, multiple: int, vocab_size: int) -> None:
    """Raises UntrainableBatch if no token is sampled, or a sequence or a token id is too large.

    A sequence padded to a `multiple` of tokens must fit a micro batch of `max_tokens`, and token
    ids must be below `vocab_size`.
    """
    trajectories = batch.trajectories
    if not sum(trajectory.num_sampled_tokens for trajectory in trajectories):
        raise untrainable(batch, range(len(batch.owners)), "no trajectory has a sampled token")
    sizes = [round_up(length, multiple) for length in batch.lengths()]
    long = [index for index, size in enumerate(sizes) if size > max_tokens]
    if long:
        raise untrainable(
            batch,
            long,
            f"a sequence of {max(sizes)} tokens does not fit learner.micro_batch_tokens, "
            f"{max_tokens} for each sequence",
        )
    tokens = [int(trajectory.token_ids.max(initial=0)) for trajectory in trajectories]
    strange = [index for index, owner in enumerate(batch.owners) if tokens[owner] >= vocab_size]
    if strange:
        raise untrainable(
            batch, strange, f"token {max(tokens)} is outside the vocabulary of {vocab_size}"
        )


def check_references(batch: Batch, *, top_k: int, vocab_size: int) -> None:
    """Raises UntrainableBatch if a trajectory lacks log-probabilities of a served reference model.

    They must cover `top_k` tokens at each position, with ids below `vocab_size`.
    """

    def fits(trajectory: Trajectory) -> bool:
        found = trajectory.reference
        return (
            found is not None
            and found.top_k == top_k
            and int(found.top_ids.max(initial=0)) < vocab_size
        )

    faulty = [
        index for index, owner in enumerate(batch.owners) if not fits(batch.trajectories[owner])
    ]
    if faulty:
        raise untrainable(
            batch,
            faulty,
            f"a trajectory lacks log-probabilities of reference.server with top_k {top_k} and a "
            f"vocabulary of {vocab_size}",
        )
