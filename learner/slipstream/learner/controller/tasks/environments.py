"""The environments of a run: which are ready, whose turn it is, which task comes next.

Weights govern accepted groups: the environment that is furthest behind its share is leased next.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.learner.controller.records.history import (
    EnvironmentHistory,
    OpenGroup,
    RunHistory,
)
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.protocol.types import GroupId
from slipstream.v1 import environment_pb2 as pb
from slipstream.v1 import trajectory_pb2

# Above this number of tasks they are taken in their own order: a permutation would not fit memory.
MAX_SHUFFLED_TASKS = 1_000_000
MAX_TOLD_CAUSES = 3
# So many tasks in a row may have too long a prompt, or all that there are.
MAX_SKIPPED_TASKS = 1000


@dataclass(eq=False)
class EnvironmentEntry:
    """One environment of the run."""

    spec: pb.EnvironmentSpec
    state: pb.EnvironmentState = pb.ENVIRONMENT_STATE_PENDING
    num_tasks: int = 0
    cause: str = ""
    loaded_on: set[ServerKey] = field(default_factory=set)
    failed_on: dict[ServerKey, str] = field(default_factory=dict)
    # Room of the client that serves it; None: hosted beside the servers.
    client_episodes: int | None = None
    groups_leased: int = 0
    groups_accepted: int = 0
    groups_failed: int = 0
    failed_in_a_row: int = 0
    # Tasks whose prompt is too long.
    tasks_skipped: int = 0
    skipped_in_a_row: int = 0
    episodes_failed: int = 0
    told_causes: set[str] = field(default_factory=set)
    # Why each task was set aside last, as people were told.
    told_set_aside: dict[int, str] = field(default_factory=dict)
    reward_sum: float = 0.0
    rewards: int = 0
    # Share that was dealt out before it came.
    head_start: float = 0.0
    next_number: int = 0
    order: list[int] = field(default_factory=list)
    # Of an evaluation: what was measured last.
    newest_round: pb.EvaluationRound | None = None

    @property
    def is_training(self) -> bool:
        """Whether its episodes are trained on."""
        return self.spec.purpose == trajectory_pb2.EPISODE_PURPOSE_TRAINING

    @property
    def is_ready(self) -> bool:
        """Whether groups may be leased for it."""
        return self.state == pb.ENVIRONMENT_STATE_READY

    @property
    def share(self) -> float:
        """Groups that it was given, by weight."""
        dealt = self.groups_accepted + self.groups_leased
        return self.head_start + dealt / self.spec.weight

    def runs_on(self, key: ServerKey) -> bool:
        """Whether a server can run its episodes now."""
        return self.client_episodes is not None or key in self.loaded_on

    def is_news(self, cause: str) -> bool:
        """Whether people should read why an episode failed: each cause once, and the first few."""
        if cause in self.told_causes or len(self.told_causes) >= MAX_TOLD_CAUSES:
            return False
        self.told_causes.add(cause)
        return True

    def is_new_set_aside(self, task_index: int, cause: str) -> bool:
        """Whether people have not read yet that this task was set aside for this cause."""
        is_new = self.told_set_aside.get(task_index) != cause
        self.told_set_aside[task_index] = cause
        return is_new

    def describe(self) -> pb.EnvironmentStatus:
        """The entry as the status call shows it."""
        return pb.EnvironmentStatus(
            spec=self.spec,
            state=pb.EnvironmentState.Name(self.state),
            num_tasks=self.num_tasks,
            cause=self.cause,
            groups_accepted=self.groups_accepted,
            groups_failed=self.groups_failed,
            episodes_failed=self.episodes_failed,
            reward_mean=self.reward_sum / self.rewards if self.rewards else 0.0,
            newest_round=self.newest_round,
        )


class EnvironmentBook:
    """All environments, by name; pure state."""

    def __init__(self, *, seed: int, max_failed_groups: int) -> None:
        self._seed = seed
        self._max_failed_groups = max_failed_groups
        self.entries: dict[str, EnvironmentEntry] = {}
        # What the journal of an earlier start holds of each, and of its open groups.
        self._earlier: dict[str, EnvironmentHistory] = {}
        self._open_groups: dict[GroupId, OpenGroup] = {}

    def restore(self, history: RunHistory) -> None:
        """Environments that are added go on where the journal ends, and get a new chance."""
        self._earlier, self._open_groups = history.environments, history.open_groups

    def add(self, spec: pb.EnvironmentSpec) -> EnvironmentEntry:
        """Adds an environment, or replaces a suspended one of that name."""
        entry = EnvironmentEntry(spec)
        earlier = self._earlier.pop(spec.name, None)
        if earlier is not None:
            open_groups = self._open_groups.values()
            entry.groups_leased = sum(g.environment == spec.name for g in open_groups)
            entry.next_number = earlier.next_number
            entry.groups_accepted, entry.groups_failed = earlier.accepted, earlier.failed
            self.entries[spec.name] = entry
            return entry
        shares = [other.share for other in self.training() if other.is_ready]
        entry.head_start = min(shares, default=0.0)
        self.entries[spec.name] = entry
        return entry

    def remove(self, name: str) -> None:
        """Forgets an environment."""
        self.entries.pop(name, None)

    @property
    def tasks_skipped(self) -> int:
        """Tasks with too long a prompt, of all environments; each counts as often as it came."""
        return sum(entry.tasks_skipped for entry in self.entries.values())

    def training(self) -> list[EnvironmentEntry]:
        """The environments that are trained on."""
        return [entry for entry in self.entries.values() if entry.is_training]

    def suspended(self) -> dict[str, str]:
        """Why environments that were to be trained on are suspended, by name."""
        state = pb.ENVIRONMENT_STATE_SUSPENDED
        return {e.spec.name: e.cause for e in self.training() if e.state == state}

    def evaluations(self) -> list[EnvironmentEntry]:
        """The environments that are only measured."""
        return [entry for entry in self.entries.values() if not entry.is_training]

    def next_for(
        self, key: ServerKey, open_episodes: Mapping[str, int], group_size: int
    ) -> EnvironmentEntry | None:
        """The environment whose turn it is; `open_episodes` counts those of each."""
        ready = [
            entry
            for entry in self.training()
            if self.may_run(entry, key, open_episodes, group_size)
        ]
        return min(ready, key=lambda entry: entry.share, default=None)

    @staticmethod
    def may_run(
        entry: EnvironmentEntry, key: ServerKey, open_episodes: Mapping[str, int], episodes: int
    ) -> bool:
        """Whether so many more episodes of it can run on a server; a client has its own room."""
        has_room = (
            entry.client_episodes is None
            or open_episodes.get(entry.spec.name, 0) + episodes <= entry.client_episodes
        )
        return entry.is_ready and entry.runs_on(key) and has_room

    def next_task(self, entry: EnvironmentEntry) -> tuple[int, int]:
        """Index and seed of its next task: every task once, in a seeded order, then again."""
        number = entry.next_number
        entry.next_number += 1
        name = entry.spec.name
        seed = random.Random(f"{self._seed}/{name}/{number}").getrandbits(48)
        if entry.num_tasks == 0 or entry.num_tasks > MAX_SHUFFLED_TASKS:
            return number, seed
        round_number, place = divmod(number, entry.num_tasks)
        if place == 0 or not entry.order:
            entry.order = list(range(entry.num_tasks))
            random.Random(f"{self._seed}/{name}/order/{round_number}").shuffle(entry.order)
        return entry.order[place], seed

    def loaded(self, name: str, key: ServerKey, num_tasks: int) -> None:
        """A worker beside a server has loaded it; servers that have it agree on `num_tasks`."""
        entry = self.entries.get(name)
        if entry is None:
            return
        if entry.num_tasks != num_tasks:
            entry.order.clear()
        entry.loaded_on.add(key)
        entry.failed_on.pop(key, None)
        entry.num_tasks = num_tasks
        if entry.state == pb.ENVIRONMENT_STATE_PENDING:
            entry.state = pb.ENVIRONMENT_STATE_READY

    def load_failed(self, name: str, key: ServerKey, cause: str) -> None:
        """No worker beside a server could load it, or none lives any more."""
        entry = self.entries.get(name)
        if entry is None:
            return
        entry.loaded_on.discard(key)
        entry.failed_on[key] = cause
        entry.cause = cause

    def server_lost(self, key: ServerKey) -> None:
        """A server is gone, and its workers with it."""
        for entry in self.entries.values():
            entry.loaded_on.discard(key)
            entry.failed_on.pop(key, None)

    def group_ended(self, name: str, *, cause: str | None) -> bool:
        """A group was accepted (`cause` None) or set aside; True when that suspends it."""
        entry = self.entries.get(name)
        if entry is None:
            return False
        entry.groups_leased = max(entry.groups_leased - 1, 0)
        if cause is None:
            entry.groups_accepted += 1
            entry.failed_in_a_row = entry.skipped_in_a_row = 0
            return False
        entry.groups_failed += 1
        entry.failed_in_a_row += 1
        entry.cause = cause
        if entry.failed_in_a_row >= self._max_failed_groups and entry.is_ready:
            entry.state = pb.ENVIRONMENT_STATE_SUSPENDED
            return True
        return False

    def measured(self, step: int, evaluations: Mapping[str, Mapping[str, float]]) -> None:
        """A round is over: the numbers of each evaluation, by name, at the version `step`."""
        for name, numbers in evaluations.items():
            # One of an earlier start may be in the configuration no more.
            entry = self.entries.get(name)
            if entry is not None:
                entry.newest_round = pb.EvaluationRound(step=step, numbers=numbers)

    def task_skipped(self, name: str, cause: str) -> bool:
        """A task does not fit; True when that suspends the environment: none of many did."""
        self.group_withdrawn(name)
        entry = self.entries.get(name)
        if entry is None:
            return False
        entry.tasks_skipped += 1
        entry.skipped_in_a_row += 1
        many = min(entry.num_tasks or MAX_SKIPPED_TASKS, MAX_SKIPPED_TASKS)
        if entry.skipped_in_a_row < many or not entry.is_ready:
            return False
        entry.state, entry.cause = pb.ENVIRONMENT_STATE_SUSPENDED, cause
        return True

    def group_left_batch(self, name: str, *, is_put_back: bool) -> None:
        """An accepted group was set aside with its batch, or waits for another batch."""
        entry = self.entries.get(name)
        if entry is not None:
            entry.groups_accepted = max(entry.groups_accepted - 1, 0)
            entry.groups_leased += is_put_back
            entry.groups_failed += not is_put_back

    def group_withdrawn(self, name: str) -> None:
        """A lease was taken back without a verdict on the environment."""
        entry = self.entries.get(name)
        if entry is not None:
            entry.groups_leased = max(entry.groups_leased - 1, 0)
