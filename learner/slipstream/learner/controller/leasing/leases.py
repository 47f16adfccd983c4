"""The book of leased groups: their holders, their finished members and the choice of a batch.

The module uses no clock and no I/O. The rules of staleness are in `slipstream.core.staleness`.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.core import staleness
from slipstream.core.group_sizes import GroupSizes
from slipstream.core.types import GroupId, Purpose, Trajectory, TrajectoryName
from slipstream.learner.controller.leasing import shares
from slipstream.learner.controller.leasing.awaited import Awaited
from slipstream.learner.controller.leasing.groups import (
    Fate,
    Group,
    RawPrompt,
    fewest_members,
    reopened,
)
from slipstream.learner.controller.leasing.shares import BatchChoice, Mixture
from slipstream.learner.controller.records.history import RunHistory, group_number
from slipstream.learner.controller.records.state import OpenGroup
from slipstream.learner.controller.servers.session import ServerKey


class LeaseBook:
    """All groups that are leased and not trained yet, in the order of their leases.

    Life of a training group: `lease` gives it to a server, `add` stores its members' trajectories,
    `choose_batch` finds its step, `take_batch` takes it out. `closed` (lease ended) or `orphan`
    (server lost) leaves an unfinished group without a holder; `reassign` gives it to another
    server. `remove` takes a group out at any time.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        group_sizes: GroupSizes,
        max_staleness: int,
        num_steps: int,
        attempts_per_lease: int,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.group_sizes = group_sizes
        # Bound for new leases; deliveries are checked against `algorithm.max_staleness`.
        self.max_staleness = max_staleness
        self.num_steps = num_steps
        self._attempts_per_lease = attempts_per_lease
        # The step whose batch is being formed.
        self.step = 0
        self.groups: dict[GroupId, Group] = {}
        # Abandoned groups, whose tasks are leased before any new task.
        self.again: list[Group] = []
        # Number of training groups by their deadline step.
        self._deadlines: Counter[int] = Counter()
        self.closing: dict[GroupId, ClosingLease] = {}
        self.awaited = Awaited()
        # Groups whose holder has closed the lease, and whose trajectories have not all arrived.
        self._closed: set[GroupId] = set()
        # Numbers of the next group and of the next evaluation, and of this controller's start. A
        # restart numbers evaluations from 0 again, so their ids contain the number of the start.
        self._next_group = self._next_evaluation = 0
        self._starts = 1

    def restore(self, history: RunHistory) -> None:
        """Restores the book from the journal's `history`; its open groups wait for a server."""
        self.step = history.next_step
        self._next_group = history.next_group
        self._starts = history.starts
        for open_group in history.open_groups.values():
            self._keep(self._reopened(open_group))
        # A server whose stream was lost before the earlier controller ended may still live, and
        # hold what it has finished.
        holders = [group.server for group in history.open_groups.values()]
        self.awaited = Awaited(holders)

    def _reopened(self, record: OpenGroup) -> Group:
        size = self.group_sizes.of(record.environment)
        return reopened(record, size, self._attempts_per_lease)

    def training_groups(self) -> list[Group]:
        """Returns the groups that the staleness invariant counts: all except evaluations."""
        return [group for group in self.groups.values() if group.purpose is Purpose.TRAINING]

    def held(self) -> list[Trajectory]:
        """Returns the received trajectories of all groups."""
        return [t for group in self.groups.values() for t in group.finished.values()]

    def held_by(self, holder: ServerKey) -> list[Group]:
        """Returns the groups whose present lease belongs to `holder`."""
        return [group for group in self.groups.values() if group.holder == holder]

    def orphans(self) -> list[Group]:
        """Returns the incomplete training groups that have no server and are not `awaited`."""
        return [
            group
            for group in self.training_groups()
            if group.holder is None and not group.is_complete and not self.awaited.has(group)
        ]

    def torn(self) -> list[Group]:
        """Returns the orphans with members that were compared with others that are lost."""
        return [group for group in self.orphans() if group.judged_lease is not None]

    def episodes_by_holder(self) -> Counter[ServerKey]:
        """Returns how many members each server runs or will run, closing leases included."""
        episodes: Counter[ServerKey] = Counter()
        for group in self.groups.values():
            if group.holder is not None:
                episodes[group.holder] += group.num_running
        for lease in self.closing.values():
            episodes[lease.holder] += len(lease.members)
        return episodes

    def episodes_by_environment(self) -> Counter[str]:
        """Returns the unfinished members of each environment, closing leases included."""
        episodes: Counter[str] = Counter()
        for group in self.groups.values():
            episodes[group.environment] += group.num_missing
        for lease in self.closing.values():
            episodes[lease.environment] += len(lease.members)
        return episodes

    @property
    def promised_episodes(self) -> int:
        return self.episodes_by_environment().total()

    def may_lease(self, served_step: int) -> bool:
        """Whether a server of version `served_step` may start one more group."""
        deadlines = self._deadlines + Counter([self._deadline(served_step)])
        return staleness.holds(deadlines, self.step, self.groups_per_step)

    def _deadline(self, served_step: int) -> int:
        return staleness.deadline(served_step, self.max_staleness, self.num_steps)

    def lease(
        self, environment: str, task_index: int, seed: int, holder: ServerKey, served_step: int
    ) -> Group:
        """Leases a new group; `may_lease` must allow it."""
        assert self.may_lease(served_step)
        group = Group(
            group_id=GroupId(f"g{self._next_group:06d}"),
            environment=environment,
            task_index=task_index,
            seed=seed,
            purpose=Purpose.TRAINING,
            size=self.group_sizes.of(environment),
            deadline_step=self._deadline(served_step),
            holder=holder,
        )
        self._next_group += 1
        group.allow(holder.epoch, 0, self._attempts_per_lease)
        self._keep(group)
        return group

    def lease_episode(
        self,
        environment: str,
        holder: ServerKey,
        served_step: int,
        *,
        task_index: int,
        seed: int = 0,
        prompt: RawPrompt | None = None,
    ) -> Group:
        """Leases one episode that is never trained: of an evaluation, or a reply to `prompt`.

        `task_index` is, with a prompt, the place of the reply among those to the prompt.
        """
        group = Group(
            group_id=GroupId(f"e{self._starts}-{self._next_evaluation:06d}"),
            environment=environment,
            task_index=task_index,
            seed=seed,
            purpose=Purpose.EVALUATION,
            size=1,
            deadline_step=served_step,
            holder=holder,
            prompt=prompt,
        )
        self._next_evaluation += 1
        group.allow(holder.epoch, 0, self._attempts_per_lease)
        self._keep(group)
        return group

    def may_reassign(self, group: Group, served_step: int) -> bool:
        """Whether a server of version `served_step` may finish an orphan by its deadline step."""
        return group.deadline_step <= self._deadline(served_step)

    def reassign(self, group: Group, holder: ServerKey) -> None:
        """Gives an orphan, a group without a server, to another server."""
        group.holder = holder
        group.closed = False
        group.sent_at_close = None
        group.num_leases += 1
        group.first_attempt = group.next_attempt
        group.allow(holder.epoch, group.first_attempt, self._attempts_per_lease)
        group.ended.clear()
        self._closed.discard(group.group_id)

    def orphan(self, holder: ServerKey) -> list[Group]:
        """Takes all leases from a lost server; returns its unfinished groups.

        The groups keep their finished members and wait for another server.
        """
        self.closing = {g: lease for g, lease in self.closing.items() if lease.holder != holder}
        orphans = [group for group in self.held_by(holder) if not group.is_complete]
        for group in orphans:
            group.holder = None
            group.setbacks.update(group.running)
        return orphans

    def add(self, trajectory: Trajectory) -> Fate:
        """Adds a trajectory if its group needs it; returns whether to keep, retry or drop it."""
        if not trajectory.will_retry:
            self._end_closing(trajectory.group_id, trajectory.member, trajectory.server_epoch)
        group = self.groups.get(trajectory.group_id)
        member = trajectory.member
        if group is None or member >= group.size or member in group.finished:
            return Fate.SUPERSEDED
        if member in group.failed:
            # Late, from a lease that is over.
            return Fate.SUPERSEDED
        group.note_attempt(member, trajectory.attempt)
        may_end = group.may_end(trajectory.server_epoch, trajectory.attempt)
        if trajectory.has_reward:
            judged = (trajectory.server_epoch, trajectory.judged_lease)
            if judged[1] and not (may_end and group.judged_lease in (None, judged)):
                # Members that were compared in different leases are never in one group.
                return Fate.SUPERSEDED
            if member in group.running and not may_end:
                # Late, from a lease that is over: the present holder still runs the member.
                self._keep_slots(group, {member})
            group.finished[member] = trajectory
            self._hand_back(group)
            return Fate.HELD
        if trajectory.failure is not None and trajectory.will_retry:
            return Fate.RETRIED
        if not may_end:
            # Late, from a lease that is over: the member runs under another lease by now.
            return Fate.CANCELLED if trajectory.failure is None else Fate.RETRIED
        group.ended.add(member)
        self._hand_back(group)
        return Fate.CANCELLED if trajectory.failure is None else Fate.FAILED

    def give_up(self, group: Group, members: Collection[int]) -> bool:
        """Marks `members` as failed and returns True, or returns False if the group must end.

        If the group must end, nothing is changed. It must end if too few members would be left. It
        must also end if no member has finished and at least two members and a quarter of all have
        failed: such a task may crash one worker after another.
        """
        num_failed = len(group.failed.union(members))
        is_hopeless = not group.finished and num_failed >= max(2, group.size / 4)
        if is_hopeless or group.size - num_failed < fewest_members(group.size):
            return False
        if still_run := set(members).intersection(group.running):
            self._keep_slots(group, still_run)
        group.failed.update(members)
        self._hand_back(group)
        return True

    def oldest_open(self, environment: str) -> float:
        """Returns the lowest number of an environment's incomplete groups; infinity for none."""
        return min(
            (
                group_number(group.group_id) or 0
                for group in self.training_groups()
                if group.environment == environment and not group.is_complete
            ),
            default=math.inf,
        )

    def quarantined(self, name: TrajectoryName, *, will_retry: bool) -> Group | None:
        """Notes a quarantined trajectory.

        Returns its group if the member must run again, else None. `will_retry` says whether its
        server tries the member again without a new lease.
        """
        if not will_retry:
            self._end_closing(name.group_id, name.member, name.epoch)
        group = self.groups.get(name.group_id)
        # The name is forged if no lease allows its attempt.
        if group is None or group.excess(name.epoch, name.attempt):
            return None
        if name.member not in group.missing:
            return None
        group.note_attempt(name.member, name.attempt)
        group.setbacks[name.member] += 1
        if not will_retry and group.may_end(name.epoch, name.attempt):
            group.ended.add(name.member)
            self._hand_back(group)
        return group

    def remove(self, group_id: GroupId) -> Group | None:
        """Takes a group out of the book in any state; returns it, or None if the book lacks it."""
        if group_id not in self.groups:
            return None
        group = self._take(group_id)
        if group.running:
            self._keep_slots(group, set(group.running))
        return group

    def closed(
        self,
        group_id: GroupId,
        holder: ServerKey,
        unfinished: Sequence[int],
        *,
        next_attempt: int = 0,
    ) -> None:
        """Notes that `holder` has closed its lease of the group, and left `unfinished` members.

        Once the trajectories of all other members have arrived, the group waits for another server.
        Trajectories of attempts before `next_attempt` may still arrive, so their numbers are not
        used again. Raises ProtocolError for members or attempts that are not in the lease.
        """
        closing = self.closing.get(group_id)
        if closing is not None and closing.holder == holder:
            del self.closing[group_id]
        group = self.groups.get(group_id)
        if group is not None and group.holder == holder:
            group.check_report(unfinished, next_attempt)
            group.closed = True
            group.unused_attempt = max(group.unused_attempt, next_attempt)
            group.ended.update(unfinished)
            self._hand_back(group)
            if group.holder is not None:
                self._closed.add(group_id)

    def short_leases(self, holder: ServerKey, num_sent: int, num_arrived: int) -> list[Group]:
        """Returns the groups whose members `holder` neither delivered nor named unfinished.

        It has closed their leases. `num_sent` is the number of trajectories that it has sent by
        now, `num_arrived` that up to the newest that arrived: they arrive in order. So a member is
        lost once all that was sent before the close has arrived.
        """
        short = []
        for group in [self.groups[group_id] for group_id in self._closed]:
            if group.holder == holder and group.running:
                if group.sent_at_close is None:
                    group.sent_at_close = num_sent
                if num_arrived >= group.sent_at_close:
                    short.append(group)
        return short

    def run_again(self, group: Group) -> list[int]:
        """Ends the running members of a closed lease, and returns them: others run them again."""
        members = group.running
        group.shunned = group.holder
        group.setbacks.update(members)
        group.ended.update(members)
        self._hand_back(group)
        return members

    def _hand_back(self, group: Group) -> None:
        """Removes the holder of an incomplete group if its lease is closed and no member runs."""
        if group.closed and not group.running and not group.is_complete:
            group.holder = None
            self._closed.discard(group.group_id)

    @property
    def has_whole_batch(self) -> bool:
        """Whether at least `groups_per_step` groups are complete."""
        complete = sum(group.is_complete for group in self.training_groups())
        return complete >= self.groups_per_step

    def choose_batch(self, mixture: Mixture) -> BatchChoice[Group] | None:
        """Returns the batch of the step, with the groups that it waits for; see `shares.choose`."""
        return shares.choose(self.training_groups(), self.step, self.groups_per_step, mixture)

    def take_batch(self, choice: BatchChoice[Group]) -> list[Group]:
        """Takes the groups of a choice that waits for none out, and moves to the next step."""
        assert not choice.awaited
        self.step += 1
        return [self._take(group.group_id) for group in choice.groups]

    def put_back(
        self, step: int, groups: Iterable[Group], records: Mapping[GroupId, OpenGroup]
    ) -> None:
        """Puts `groups` of the last batch back, for which `step` had room, to be formed again.

        The leases of a group that comes from the batch's file are those of its record.
        """
        assert step == self.step - 1
        self.step = step
        for group in groups:
            if not group.allowed:
                finished = group.finished
                record = records[group.group_id]
                group = self._reopened(record)
                group.refill(finished, finished)
            group.deadline_step = step
            self._keep(group)

    def due(self) -> list[Group]:
        """Returns the unfinished groups for which the next batch waits."""
        return staleness.due_groups(self.training_groups(), self.step, self.groups_per_step)

    def _keep_slots(self, group: Group, members: set[int]) -> None:
        """Keeps the slots of `members` occupied until their holder, if any, has ended them."""
        if group.holder is not None:
            lease = ClosingLease(group.environment, group.holder)
            self.closing.setdefault(group.group_id, lease).members |= members

    def _end_closing(self, group_id: GroupId, member: int, epoch: int) -> None:
        lease = self.closing.get(group_id)
        if lease is not None and lease.holder.epoch == epoch:
            lease.members.discard(member)
            if not lease.members:
                del self.closing[group_id]

    def _keep(self, group: Group) -> None:
        self.groups[group.group_id] = group
        if group.purpose is Purpose.TRAINING:
            self._deadlines[group.deadline_step] += 1

    def _take(self, group_id: GroupId) -> Group:
        group = self.groups.pop(group_id)
        self._closed.discard(group_id)
        if group.purpose is Purpose.TRAINING:
            self._deadlines[group.deadline_step] -= 1
            # Drops deadlines that no group has.
            self._deadlines = +self._deadlines
        return group


@dataclass(eq=False)
class ClosingLease:
    """The `members` that `holder` still runs although their group no longer waits for them.

    They still count against the episode slots of the server and the bytes of the queue, until each
    has ended, the server has closed the lease, or the server is lost.
    """

    environment: str
    holder: ServerKey
    members: set[int] = field(default_factory=set)
