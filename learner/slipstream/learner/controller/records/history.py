"""The state of a run, rebuilt only from the records of its journal.

Any prefix of a journal gives a state in which no group is lost and none can be trained twice: every
leased group is open, or in exactly one batch, or closed for good. The module uses no clock and no
I/O.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from pydantic import JsonValue
from slipstream.core.errors import ProtocolError
from slipstream.core.types import (
    GroupId,
    PolicyVersion,
    ServerId,
    TrajectoryId,
    TrajectoryName,
)
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.kinds import Record, TrajectoryEnd, parsed
from slipstream.learner.controller.records.seen_ids import GroupSteps, SeenIds
from slipstream.learner.controller.servers.server_epochs import MAX_GAP, ServerEpochs
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.protocol.bounds import one_line, shown
from slipstream.protocol.queue.base import Amount

FORMAT = 1
# Advice for the user if a journal or a batch is damaged.
REMEDY = "put it back from a copy of the run, or begin anew with another run.name"
START = PolicyVersion(0, 0)


class FilterVerdict(Enum):
    """The conclusion from the groups that dynamic sampling left out of one batch."""

    # Too few groups were left out to judge.
    GO_ON = "go on"
    # Every group that was left out had full rewards: nothing is left to learn.
    SOLVED = "solved"
    # Too many groups had equal rewards that were not full: no batch comes together.
    STUCK = "stuck"


@dataclass
class Tally:
    """Counts of the groups of one environment that dynamic sampling left out."""

    groups: int = 0
    # Number of groups in which every episode has the full reward.
    solved: int = 0
    # Sum over the groups of the mean reward of their episodes.
    reward_sum: float = 0.0


@dataclass
class FilteredGroups:
    """The groups that dynamic sampling left out since the last batch, counted by environment."""

    tallies: dict[str, Tally] = field(default_factory=dict)

    def add(self, environment: str, reward_mean: float, *, solved: bool) -> None:
        """Counts a group with its mean reward; `solved` says whether all its rewards are full."""
        tally = self.tallies.setdefault(environment, Tally())
        tally.groups += 1
        tally.solved += solved
        tally.reward_sum += reward_mean

    def clear(self) -> None:
        """Resets the counts, when a batch has been formed."""
        self.tallies.clear()

    @property
    def total(self) -> int:
        """Number of groups that were left out."""
        return sum(tally.groups for tally in self.tallies.values())

    def verdict(self, limit: int) -> FilterVerdict:
        """Returns GO_ON if fewer than `limit` groups were left out, else SOLVED or STUCK.

        One group that is not solved is enough for STUCK: the run has not learnt that task.
        """
        if self.total < limit:
            return FilterVerdict.GO_ON
        solved = all(tally.solved == tally.groups for tally in self.tallies.values())
        return FilterVerdict.SOLVED if solved else FilterVerdict.STUCK

    def describe(self) -> str:
        """Returns the counts and the mean reward of each environment as text."""
        return "; ".join(
            f"{name}: {tally.solved} of {tally.groups} solved, mean reward "
            f"{tally.reward_sum / tally.groups:.3g}"
            for name, tally in sorted(self.tallies.items())
        )


def is_solved(rewards: Iterable[float], solved_reward: float) -> bool:
    """Whether each episode of a group has the full reward or more."""
    return all(reward >= solved_reward for reward in rewards)


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


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """The journal's record of the batch of a step."""

    step: int
    batch_id: str
    crc32: int

    @property
    def attempt(self) -> int:
        """Number of earlier batches of the same step that were set aside."""
        return attempt_of(self.batch_id)


@dataclass(frozen=True, slots=True)
class JournaledStep:
    """The version that the trainer made from a batch."""

    version: PolicyVersion
    digest: str


@dataclass
class EnvironmentHistory:
    """Counts of an environment's groups."""

    next_number: int = 0
    # Groups that were in a batch or filtered, and the filtered groups among them.
    accepted: int = 0
    filtered: int = 0
    failed: int = 0
    # Digest of the tasks; "" if it was not journaled.
    digest: str = ""


@dataclass
class RunHistory:
    """The state of a run at the end of its journal."""

    run_id: str = ""
    # Number of controller starts.
    starts: int = 0
    # Number of entries that Redis had ever counted at the last start; None without Redis.
    queue_added: int | None = None
    next_group: int = 0
    open_groups: dict[GroupId, OpenGroup] = field(default_factory=dict)
    trained_in: GroupSteps = field(default_factory=GroupSteps)
    ended: SeenIds = field(default_factory=SeenIds)
    batches: dict[int, RecordedBatch] = field(default_factory=dict)
    # The newest record of each step.
    steps: dict[int, JournaledStep] = field(default_factory=dict)
    environments: defaultdict[str, EnvironmentHistory] = field(
        default_factory=lambda: defaultdict(EnvironmentHistory)
    )
    # Specification of each submitted environment, as JSON.
    submitted: dict[str, str] = field(default_factory=dict)
    # Every server that joined, with its tokens of trajectories that ended or are in a batch.
    servers: ServerEpochs = field(default_factory=ServerEpochs)
    # The largest number of each journaled gap that no server can have caused.
    ignored_gaps: dict[ServerKey, int] = field(default_factory=dict)
    ends: Counter[TrajectoryEnd] = field(default_factory=Counter)
    # The trajectories that ended or are in a batch, and by how much the writer's last count of them
    # was larger.
    settled: Amount = Amount()
    unread: Amount = Amount()
    # Number of trained tokens of each lag.
    lags: Counter[int] = field(default_factory=Counter)
    # Number of trained trajectories that more than one version sampled.
    with_several_versions: int = 0
    evaluations: list[kinds.Evaluation] = field(default_factory=list)
    # The newest version with a whole checkpoint.
    checkpoint: PolicyVersion = START
    batch_tokens: dict[int, int] = field(default_factory=dict)
    # Groups that were filtered since the last batch.
    filtered: FilteredGroups = field(default_factory=FilteredGroups)
    # Number of filtered groups, by the step whose batch was being formed.
    filtered_groups: Counter[int] = field(default_factory=Counter)
    # Why the tasks count as solved, which ended training early. Empty if it did not.
    solved: str = ""
    # The step whose batch was being formed when the task was solved.
    solved_step: int = 0
    # Batches that could not be trained, and how many in a row the trainer's reports set aside.
    set_aside: list[RecordedBatch] = field(default_factory=list)
    set_aside_in_a_row: int = 0
    # Open groups that a set-aside batch held; its file has all their trajectories.
    put_back: dict[GroupId, RecordedBatch] = field(default_factory=dict)
    # The groups of the newest batch, which may be put back.
    batched: dict[GroupId, OpenGroup] = field(default_factory=dict)

    @property
    def next_step(self) -> int:
        """The first step whose batch is not in the journal."""
        return len(self.batches)

    @property
    def version(self) -> PolicyVersion:
        """The newest version that the trainer made."""
        if not self.steps:
            return START
        newest = self.steps[max(self.steps)].version
        return PolicyVersion(self.incarnation, newest.step)

    @property
    def incarnation(self) -> int:
        """The newest incarnation; a step that is repeated and gives other weights begins one."""
        return max((step.version.incarnation for step in self.steps.values()), default=0)

    def add(self, record: Record) -> None:
        """Applies the next record; raises ProtocolError if it contradicts the records before it."""
        self.settled = settled_by(self.settled, record)
        match record:
            case kinds.Start():
                self._start(record)
            case kinds.Queue():
                self.queue_added = record.added or 0
            case kinds.Lease():
                self._lease(record)
            case kinds.EvaluationLease():
                self.servers.join(ServerKey(ServerId(record.server), record.epoch))
            case kinds.End():
                self._end(record)
            case kinds.GaveUp():
                if (group := self.open_groups.get(record.group)) is not None:
                    group.failed.update(record.members)
            case kinds.GroupSetAside():
                if (ended := self.open_groups.pop(record.group, None)) is not None:
                    self.environments[ended.environment].failed += 1
            case kinds.Closed():
                self._close(record)
            case kinds.Batch():
                self._batch(record)
            case kinds.BatchSetAside():
                self._set_batch_aside(record)
            case kinds.Step():
                self._step(record)
            case kinds.Servers():
                self._servers(record)
            case kinds.Solved():
                self.solved, self.solved_step = record.cause, record.step
            case kinds.Checkpoint():
                self.checkpoint = record.version
            case kinds.Submitted():
                self.submitted[record.environment] = record.spec
                self.environments.pop(record.environment, None)
            case kinds.Unsubmitted():
                self.submitted.pop(record.environment, None)
            case kinds.Tasks():
                tasks = self.environments[record.environment]
                if tasks.digest:
                    # Other tasks: each of them comes once before one comes again.
                    tasks.next_number = 0
                tasks.digest = record.digest
            case kinds.Evaluation():
                self.evaluations.append(record)

    def _start(self, record: kinds.Start) -> None:
        if record.format != FORMAT:
            raise ProtocolError(
                f"the journal has format {record.format}, this version reads {FORMAT}"
            )
        self.servers.all_died()
        self.run_id = record.run_id
        self.starts += 1

    def _lease(self, record: kinds.Lease) -> None:
        self.servers.join(ServerKey(ServerId(record.server), record.epoch))
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
            self.open_groups.pop(record.replaces, None)
        self.next_group = number + 1
        history = self.environments[record.environment]
        history.next_number = max(history.next_number, record.number + 1)
        self.open_groups[record.group] = OpenGroup(
            record.group,
            record.environment,
            record.task,
            record.seed,
            record.deadline,
            epochs={record.epoch},
            server=record.server,
        )

    def _end(self, record: kinds.End) -> None:
        trajectory_id = TrajectoryId(record.id)
        self.ended.add(trajectory_id)
        if record.end is None or record.tokens is None:
            return
        assert record.server is not None
        assert record.epoch is not None
        self.ends[record.end] += record.tokens
        self.servers.count(
            ServerKey(ServerId(record.server), record.epoch)
        ).received += record.tokens
        name = TrajectoryName.parse(trajectory_id)
        group = None if name is None else self.open_groups.get(name.group_id)
        is_attempt = record.end is not TrajectoryEnd.QUARANTINED
        if name is not None and group is not None and is_attempt:
            before = group.attempts.get(name.member, -1)
            group.attempts[name.member] = max(before, name.attempt)

    def _close(self, record: kinds.Closed) -> None:
        group = self.open_groups.pop(record.group, None)
        if group is None or record.how != "filtered":
            return
        history = self.environments[group.environment]
        history.accepted += 1
        history.filtered += 1
        self.filtered.add(group.environment, record.reward or 0.0, solved=bool(record.solved))
        self.filtered_groups[self.next_step] += 1

    def _batch(self, record: kinds.Batch) -> None:
        step = record.step
        if step != self.next_step:
            raise ProtocolError(
                f"the journal holds the batch of step {step + 1} after that of {self.next_step}"
            )
        self.filtered.clear()
        if step >= self.solved_step:
            # Training continued under other settings. The batch before was being written.
            self.solved = ""
        self.batches[step] = RecordedBatch(step, record.batch_id, record.crc32)
        self.batched.clear()
        for group_id in record.groups:
            group = self.open_groups.pop(group_id, None)
            if group is None:
                raise ProtocolError(
                    f"the batch of step {step + 1} holds {group_id}, which is not open"
                )
            self.batched[group_id] = group
            self.trained_in.add(group_id, step)
            self.put_back.pop(group_id, None)
            self.environments[group.environment].accepted += 1
        for name, epoch, tokens in record.tokens:
            self.servers.count(ServerKey(ServerId(name), epoch)).received += tokens
        self.batch_tokens[step] = sum(tokens for *_, tokens in record.tokens)

    def _set_batch_aside(self, record: kinds.BatchSetAside) -> None:
        step = record.step
        batch = self.batches.get(step)
        is_last = step == self.next_step - 1 and step not in self.steps
        if batch is None or batch.batch_id != record.batch_id or not is_last:
            raise ProtocolError(
                f"the journal sets batch {record.batch_id} of step {step + 1} aside, "
                "which does not wait for the trainer"
            )
        del self.batches[step], self.batch_tokens[step]
        self.set_aside.append(batch)
        self.set_aside_in_a_row = 0 if record.by == "user" else self.set_aside_in_a_row + 1
        for group_id, environment, _ in record.groups:
            self.trained_in.discard(group_id)
            history = self.environments[environment]
            history.accepted, history.failed = history.accepted - 1, history.failed + 1
        for group_id, environment, *_ in record.put_back:
            self.trained_in.discard(group_id)
            self.environments[environment].accepted -= 1
            self.put_back[group_id] = batch
            group = self.batched[group_id]
            self.open_groups[group_id] = replace(group, deadline_step=step)
        for trajectory_id in record.ids:
            self.ended.add(TrajectoryId(trajectory_id))
        self.ends[TrajectoryEnd.SET_ASIDE] += record.tokens
        # These tokens count again with the later batch or end of their trajectories.
        for name, epoch, tokens in record.put_back_tokens:
            self.servers.count(ServerKey(ServerId(name), epoch)).received -= tokens

    def _step(self, record: kinds.Step) -> None:
        step = record.step
        if step not in self.batches:
            raise ProtocolError(f"the journal holds step {step + 1} without its batch")
        if step not in self.steps:
            self.ends[TrajectoryEnd.TRAINED] += self.batch_tokens[step]
            self.lags.update(dict(record.lags))
            self.with_several_versions += record.several
        self.steps[step] = JournaledStep(record.version, record.digest)
        self.set_aside_in_a_row = 0

    def _servers(self, record: kinds.Servers) -> None:
        if record.settled is not None:
            self.unread = Amount(*record.settled).less(self.settled)
        judged = {(name, epoch): tokens for name, epoch, tokens in record.judged}
        gaps = {(name, epoch): numbers for name, epoch, numbers in record.gaps}
        for name, epoch, generated in record.generated:
            key = ServerKey(ServerId(name), epoch)
            count = self.servers.join(key)
            gap = gaps.get((name, epoch), ())
            count.take_gaps(gap)
            if max(map(abs, gap), default=0) > MAX_GAP:
                self.ignored_gaps[key] = max(gap, key=abs)
            count.reported = max(count.reported, generated)
            count.judged = max(count.judged, judged.get((name, epoch), 0))
            if record.departed:
                self.servers.depart(key)


def settled_by(settled: Amount, record: Record) -> Amount:
    """Returns the amount that has ended or is in a batch, after one more record.

    `settled` is this amount before the record, in trajectories and tokens.
    """
    match record:
        case kinds.End(tokens=int(tokens)):
            return settled.plus(tokens)
        case kinds.Batch():
            tokens = sum(tokens for *_, tokens in record.tokens)
            return settled.less(Amount(-record.trajectories, -tokens))
        case kinds.BatchSetAside():
            tokens = sum(tokens for *_, tokens in record.put_back_tokens)
            return settled.less(Amount(record.put_back_trajectories, tokens))
    return settled


def batch_name(step: int, attempt: int) -> str:
    """Returns the id of a batch of `step` after `attempt` earlier batches were set aside."""
    return f"b{step:06d}-{attempt}" if attempt else f"b{step:06d}"


def attempt_of(batch_id: str) -> int:
    """Returns the attempt in a batch id that `batch_name` made."""
    number = batch_id.partition("-")[2]
    return int(number) if number.isdecimal() else 0


def read_history(records: Iterable[Mapping[str, JsonValue]]) -> RunHistory:
    """Returns the state after all records; raises ProtocolError if a record is not valid."""
    history = RunHistory()
    for number, record in enumerate(records, start=1):
        if number == 1 and record["kind"] != "start":
            raise ProtocolError("the journal was written by an older version: it has no start")
        try:
            if (known := parsed(record)) is not None:
                history.add(known)
        except (ArithmeticError, LookupError, ValueError) as error:
            kind, cause = shown(str(record["kind"])), one_line(str(error), 200)
            raise ProtocolError(
                f"line {number} of the journal is no record {kind}: {cause}; {REMEDY}"
            ) from error
    return history
