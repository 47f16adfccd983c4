"""Sets a batch aside that cannot be trained: a pure rule, no clock, no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pydantic import JsonValue
from slipstream.core.errors import ProtocolError
from slipstream.core.settings.config import Config
from slipstream.core.types import Trajectory
from slipstream.learner.controller.leasing.groups import Group, sampled_tokens
from slipstream.learner.controller.trajectories.batch import FormedBatch, tokens_by_server

# Largest number of groups that a message names; further groups are only counted.
MAX_TOLD_GROUPS = 5


@dataclass(frozen=True)
class SetAside:
    """A batch that is not trained: `groups` are over, `put_back` wait for another batch."""

    batch: FormedBatch
    groups: tuple[Group, ...]
    put_back: tuple[Group, ...]
    cause: str
    # The party that set the batch aside: "trainer" or "user".
    by: str

    @classmethod
    def of(cls, batch: FormedBatch, named: Collection[str], cause: str, *, by: str) -> SetAside:
        """Sets the `named` groups aside, all if none is named; ProtocolError for unknown names."""
        there = {group.group_id for group in batch.groups}
        strange = [name for name in named if name not in there]
        if strange:
            raise ProtocolError(
                f"batch {batch.batch_id} of step {batch.version} has no group {strange[0]}; "
                f"it has {', '.join(sorted(there))}"
            )
        chosen = set(named) or there
        return cls(
            batch=batch,
            groups=tuple(g for g in batch.groups if g.group_id in chosen),
            put_back=tuple(g for g in batch.groups if g.group_id not in chosen),
            cause=cause,
            by=by,
        )

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories of all groups that are over."""
        return _trajectories(self.groups)

    def record(self) -> dict[str, JsonValue]:
        """The fields of the journal record; `put_back` has the tasks and seeds of its groups."""
        return {
            "step": self.batch.step,
            "batch_id": self.batch.batch_id,
            "by": self.by,
            "cause": self.cause,
            "groups": [[g.group_id, g.environment, g.task_index] for g in self.groups],
            "put_back": [[g.group_id, g.environment, g.task_index, g.seed] for g in self.put_back],
            "ids": [trajectory.trajectory_id for trajectory in self.trajectories],
            "tokens": sampled_tokens(self.trajectories),
            "put_back_tokens": [
                list(entry) for entry in tokens_by_server(_trajectories(self.put_back))
            ],
        }

    def describe(self) -> str:
        """The groups that were set aside and the cause, in one line."""
        tasks = Counter(group.environment for group in self.groups)
        told = ", ".join(
            f"{group.group_id} (environment {group.environment}, task {group.task_index})"
            for group in self.groups[:MAX_TOLD_GROUPS]
        )
        more = len(self.groups) - MAX_TOLD_GROUPS
        if more > 0:
            rest = ", ".join(f"{count} of {name}" for name, count in sorted(tasks.items()))
            told += f" and {more} more, in all {rest}"
        kept = f"; its other {len(self.put_back)} groups stay" if self.put_back else ""
        return (
            f"batch {self.batch.batch_id} of step {self.batch.version} is set aside: "
            f"{self.cause}; never trained: {told}{kept}"
        )


def way_past(batch: FormedBatch, config: Config) -> str:
    """The advice to a user about a batch at which the trainer fails each time."""
    return (
        f"batch {batch.batch_id} of step {batch.version} is trained first when the run goes on, "
        f"unless `slipstream set-aside {config.run_dir} {batch.version}` takes it out"
    )


def _trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.in_order()]
