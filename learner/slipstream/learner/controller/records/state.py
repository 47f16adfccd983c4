"""The part of a run's state that only records change, live and after a restart.

The journal applies each record that is appended; a restart applies the same records again. So what
is here cannot differ between a controller that ran on and one that was started again. The module
uses no clock and no I/O.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slipstream.core.errors import ProtocolError
from slipstream.core.types import FULL_REWARD, GroupId, PolicyVersion, TrajectoryId, TrajectoryName
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.kinds import Record, TrajectoryEnd
from slipstream.learner.controller.records.recorded_steps import (
    BatchTable,
    JournaledStep,
    RecordedBatch,
    StepTable,
)
from slipstream.learner.controller.records.task_table import TaskTable

START = PolicyVersion(0, 0)


class FilteredGroup(NamedTuple):
    """A group that dynamic sampling left out, with the mean reward of its episodes."""

    environment: str
    reward_mean: float
    # Whether every episode has the full reward.
    solved: bool


def is_solved(rewards: Iterable[float], *, lowest: float, highest: float) -> bool:
    """Whether each episode of a group has the full reward.

    It is 1, or the highest reward of its environment that was seen if that is above 1: of a judge
    from 0 to 10, equal rewards of 3 teach nothing and solve nothing. One that gave no lower reward
    has compared nothing.
    """
    if highest <= 2 - FULL_REWARD:
        return all(reward >= FULL_REWARD for reward in rewards)
    return lowest < highest and all(reward >= highest * FULL_REWARD for reward in rewards)


@dataclass(slots=True)
class OpenGroup:
    """A group that was leased and has not ended, so that a restarted controller leases it again."""

    group_id: GroupId
    environment: str
    task_index: int
    seed: int
    deadline_step: int
    # The last attempt that ended, by member.
    attempts: dict[int, int] = field(default_factory=dict)
    # Members that had their last attempt.
    failed: set[int] = field(default_factory=set)
    # Epochs of the servers that the group was leased to, and the last server.
    epochs: set[int] = field(default_factory=set)
    server: str = ""
    num_leases: int = 1
    # Whether a table of tasks has its result.
    has_result: bool = False


@dataclass
class EnvironmentCounts:
    """Counts of an environment's groups."""

    # Number of the next task.
    next_number: int = 0
    leased: int = 0
    # Groups that were in a batch or filtered, and the filtered groups among them.
    accepted: int = 0
    filtered: int = 0
    failed: int = 0
    # Smallest share of the other environments when this one joined the mixture.
    head_start: float = 0.0
    # Digest of the tasks; "" before a server has told it.
    digest: str = ""
    # The lowest and the highest reward of groups that were trained or left out; () before.
    seen: tuple[float, ...] = ()
    # The newest round in which the environment was evaluated.
    measured: kinds.Evaluation | None = None


@dataclass
class RunState:
    """The state of a run after the records that were applied."""

    next_group: int = 0
    # The first step whose batch is not in the journal.
    next_step: int = 0
    open_groups: dict[GroupId, OpenGroup] = field(default_factory=dict)
    # Batches that were not set aside, and the newest record of each step.
    batches: BatchTable = field(default_factory=BatchTable)
    steps: StepTable = field(default_factory=StepTable)
    # Earlier records of steps that were made again, in the order in which others replaced them.
    replaced: list[JournaledStep] = field(default_factory=list)
    # The newest version that the trainer made. A step that is repeated and gives other weights
    # begins an incarnation, which is the newest one from then on.
    version: PolicyVersion = START
    # Metrics of the step that made the version, if a client ordered the step.
    metrics: Mapping[str, float] = field(default_factory=dict)
    environments: defaultdict[str, EnvironmentCounts] = field(
        default_factory=lambda: defaultdict(EnvironmentCounts)
    )
    # The results by task of the environments whose tasks are drawn by weights.
    task_tables: dict[str, TaskTable] = field(default_factory=dict)
    # Specification of each submitted environment, as JSON.
    submitted: dict[str, str] = field(default_factory=dict)
    # Tokens of the trajectories that ended in each way.
    ends: Counter[TrajectoryEnd] = field(default_factory=Counter)
    # Number of trained tokens of each lag.
    lags: Counter[int] = field(default_factory=Counter)
    # Number of trained trajectories that more than one version sampled.
    with_several_versions: int = 0
    evaluations: list[kinds.Evaluation] = field(default_factory=list)
    # The newest version with a whole checkpoint.
    checkpoint: PolicyVersion = START
    # Groups that were filtered since the last batch.
    filtered: list[FilteredGroup] = field(default_factory=list)
    # Number of filtered groups, by the step whose batch was being formed.
    filtered_groups: Counter[int] = field(default_factory=Counter)
    # Seats that rounding owes to environments after the last batch, and their groups that ended
    # without being trained since then.
    owed: dict[str, float] = field(default_factory=dict)
    ended_groups: Counter[str] = field(default_factory=Counter)
    # Batches that could not be trained: all, how many of each step, and how many in a row the
    # trainer's reports set aside.
    set_aside: list[RecordedBatch] = field(default_factory=list)
    attempts: Counter[int] = field(default_factory=Counter)
    set_aside_in_a_row: int = 0
    # Groups that a set-aside batch held and no batch took since; its file has all their
    # trajectories, which are acknowledged.
    put_back: dict[GroupId, RecordedBatch] = field(default_factory=dict)
    # The groups of the newest batch, which may be put back.
    batched: dict[GroupId, OpenGroup] = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        """Applies the next record; raises ProtocolError if it contradicts the records before it."""
        match record:
            case kinds.GroupLease():
                self._lease(record)
            case kinds.End():
                self._end(record)
            case kinds.GaveUp():
                if (group := self.open_groups.get(record.group)) is not None:
                    group.failed.update(record.members)
            case kinds.GroupSetAside():
                if (ended := self._end_group(record.group)) is not None:
                    self.environments[ended.environment].failed += record.blamed
                    if (table := self.task_tables.get(ended.environment)) is not None:
                        table.failed(ended.task_index)
            case kinds.Closed():
                self._close(record)
            case kinds.StepBatch():
                self._batch(record)
            case kinds.BatchSetAside():
                self._set_batch_aside(record)
            case kinds.Step():
                self._step(record)
            case kinds.Checkpoint():
                self.checkpoint = record.version
            case kinds.Submitted():
                self.submitted[record.environment] = record.spec
                leased = self.environments[record.environment].leased
                self.environments[record.environment] = EnvironmentCounts(leased=leased)
                self.task_tables.pop(record.environment, None)
            case kinds.Unsubmitted():
                self.submitted.pop(record.environment, None)
            case kinds.HeadStart():
                self.environments[record.environment].head_start = record.head_start
            case kinds.Tasks():
                tasks = self.environments[record.environment]
                if tasks.digest:
                    # Other tasks: each of them comes once before one comes again.
                    tasks.next_number = 0
                    self.task_tables.pop(record.environment, None)
                tasks.digest = record.digest
            case kinds.TaskResult():
                self._task_result(record)
            case kinds.TaskWeights():
                self._task_weights(record)
            case kinds.Evaluation():
                self.evaluations.append(record)
                for name in record.evaluations:
                    self.environments[name].measured = record

    def _lease(self, record: kinds.GroupLease) -> None:
        number = int(record.group.removeprefix("g"))
        if number < self.next_group:
            # New groups get rising numbers: this lease gives an old group to another server.
            if (group := self.open_groups.get(record.group)) is not None:
                group.epochs.add(record.epoch)
                group.server = record.server
                group.num_leases += 1
            return
        if record.replaces is not None:
            # The task was leased before, as a group that was abandoned.
            self._end_group(record.replaces)
        self.next_group = number + 1
        counts = self.environments[record.environment]
        counts.next_number = max(counts.next_number, record.number + 1)
        counts.leased += 1
        if (table := self.task_tables.get(record.environment)) is not None:
            table.drawn(record.task, self.next_step)
        self.open_groups[record.group] = OpenGroup(
            record.group,
            record.environment,
            record.task,
            record.seed,
            record.deadline,
            epochs={record.epoch},
            server=record.server,
        )

    def _task_result(self, record: kinds.TaskResult) -> None:
        group = self.open_groups.get(record.group)
        if group is None or group.has_result:
            return
        group.has_result = True
        if (table := self.task_tables.get(group.environment)) is not None:
            table.finished(group.task_index, record.reward, record.episodes, record.passed)

    def _task_weights(self, record: kinds.TaskWeights) -> None:
        table = self.task_tables.get(record.environment)
        if table is None or table.num_tasks != record.num_tasks:
            table = self.task_tables[record.environment] = TaskTable(record.num_tasks)
        if record.events > len(table.pending):
            raise ProtocolError(
                f"the journal weighs {record.events} results of tasks of {record.environment}, and "
                f"has {len(table.pending)}"
            )
        table.take(record.events)
        table.step = record.step

    def _take(self, group_id: GroupId) -> OpenGroup | None:
        """Takes an open group out and returns it, or None if it is not open."""
        group = self.open_groups.pop(group_id, None)
        if group is not None:
            self.environments[group.environment].leased -= 1
        return group

    def _end_group(self, group_id: GroupId) -> OpenGroup | None:
        """Takes an open group out that no batch has; returns it, or None if it is not open."""
        group = self._take(group_id)
        if group is not None:
            self.ended_groups[group.environment] += 1
        return group

    def _end(self, record: kinds.End) -> None:
        self.ends[record.end] += record.tokens
        name = TrajectoryName.parse(TrajectoryId(record.id))
        group = None if name is None else self.open_groups.get(name.group_id)
        is_attempt = record.end is not TrajectoryEnd.QUARANTINED
        if name is not None and group is not None and is_attempt:
            before = group.attempts.get(name.member, -1)
            group.attempts[name.member] = max(before, name.attempt)

    def _close(self, record: kinds.Closed) -> None:
        group = self._end_group(record.group)
        if group is None or record.how != "filtered":
            return
        counts = self.environments[group.environment]
        counts.accepted += 1
        counts.filtered += 1
        if seen := (*counts.seen, *(record.seen or ())):
            counts.seen = (min(seen), max(seen))
        reward = record.reward or 0.0
        solved = bool(record.solved)
        self.filtered.append(FilteredGroup(group.environment, reward, solved))
        self.filtered_groups[self.next_step] += 1

    def _batch(self, record: kinds.StepBatch) -> None:
        step = record.step
        if step != self.next_step:
            raise ProtocolError(
                f"the journal holds the batch of step {step + 1} after that of {self.next_step}"
            )
        self.batched.clear()
        for group_id in record.groups:
            group = self._take(group_id)
            if group is None:
                raise ProtocolError(
                    f"the batch of step {step + 1} holds {group_id}, which is not open"
                )
            self.batched[group_id] = group
            self.environments[group.environment].accepted += 1
        # The journal has every end of those that were closed before this batch.
        self.put_back = {
            g: group_batch for g, group_batch in self.put_back.items() if g in self.open_groups
        }
        for name, pair in record.seen.items():
            seen = (*self.environments[name].seen, *pair)
            self.environments[name].seen = (min(seen), max(seen))
        self.filtered.clear()
        self.ended_groups.clear()
        self.owed = record.owed
        tokens = sum(tokens for *_, tokens in record.tokens)
        self.batches[step] = RecordedBatch(
            step,
            record.batch_id,
            record.crc32,
            tokens,
        )
        self.next_step += 1

    def _set_batch_aside(self, record: kinds.BatchSetAside) -> None:
        step = record.step
        batch = self.batches.get(step)
        is_last = step == self.next_step - 1 and step not in self.steps
        if batch is None or batch.batch_id != record.batch_id or not is_last:
            raise ProtocolError(
                f"the journal sets batch {record.batch_id} of step {step + 1} aside, "
                "which does not wait for the trainer"
            )
        del self.batches[step]
        self.next_step -= 1
        self.set_aside.append(batch)
        self.attempts[step] += 1
        self.set_aside_in_a_row = 0 if record.by == "user" else self.set_aside_in_a_row + 1
        # An environment that was submitted again meanwhile has counted none of the batch.
        for _, environment, _ in record.groups:
            counts = self.environments[environment]
            counts.accepted = max(counts.accepted - 1, 0)
            counts.failed = counts.failed + 1
            self.ended_groups[environment] += 1
        for group_id, environment, *_ in record.put_back:
            counts = self.environments[environment]
            counts.accepted = max(counts.accepted - 1, 0)
            counts.leased = counts.leased + 1
            self.put_back[group_id] = batch
            # Taken out: a copy would share what the open group counts from now on.
            self.open_groups[group_id] = replace(self.batched.pop(group_id), deadline_step=step)
        self.ends[TrajectoryEnd.SET_ASIDE] += record.tokens

    def _step(self, record: kinds.Step) -> None:
        step = record.step
        if step not in self.batches:
            raise ProtocolError(f"the journal holds step {step + 1} without its batch")
        if step not in self.steps:
            self.ends[TrajectoryEnd.TRAINED] += self.batches[step].tokens
            self.lags.update(dict(record.lags))
            self.with_several_versions += record.several
        if step in self.steps and self.steps[step].version != record.version:
            self.replaced.append(self.steps[step])
        self.steps[step] = JournaledStep(record.version, record.digest)
        if record.version.step >= self.version.step:
            self.metrics = record.metrics
        incarnation = max(self.version.incarnation, record.version.incarnation)
        self.version = PolicyVersion(incarnation, max(self.version.step, record.version.step))
        self.set_aside_in_a_row = 0
