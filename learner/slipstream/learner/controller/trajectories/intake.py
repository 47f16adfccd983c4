"""Takes trajectories from the queue into the lease book, and ends trajectories that no batch needs.

Consumes: deliveries of the queue. Produces: complete groups, journal records, acknowledgements.
Waits for: the next delivery. Unblocked by: the queue. A trajectory that no batch holds is
acknowledged as soon as the journal has its end.
"""

import asyncio
import contextlib
import logging
import statistics
import time
from collections.abc import Sequence

from slipstream.core.errors import ProtocolError, RunFailed
from slipstream.core.types import (
    FULL_REWARD,
    Failure,
    FailureKind,
    GroupId,
    Purpose,
    Status,
    Trajectory,
    TrajectoryId,
    TrajectoryName,
)
from slipstream.learner.algorithms.functions import is_trained
from slipstream.learner.controller.leasing.groups import Fate, Group
from slipstream.learner.controller.leasing.scheduler import Books
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory, group_number
from slipstream.learner.controller.records.kinds import TrajectoryEnd
from slipstream.learner.controller.records.state import FilteredGroup, is_solved
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.fleet import ServerListener
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.learner.controller.trajectories.feed import Feed
from slipstream.learner.controller.trajectories.inspection import EarlierIds, Inspector
from slipstream.protocol.queue.base import Delivery
from slipstream.v1 import environment_pb2, fleet_pb2

# Larger deliveries are decoded in a thread: decoding them would hold the event loop too long.
SMALL_BYTES = 256 << 10
# Exceptions that a malformed delivery may raise in the controller.
FAULTS = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
# The run ends when one batch has cost the filter the groups of this many steps.
MOST_FILTERED_BATCHES = 20
# Failures that are no fault of an environment and do not count as progress of the run.
OUTAGES = (FailureKind.INFRASTRUCTURE, FailureKind.ENGINE)

logger = logging.getLogger(__name__)


class Intake(ServerListener):
    """The only consumer of the trajectory queue.

    Life of a delivery: `consume` gets it, `accept` inspects it and adds it to the lease book. A
    valid trajectory is held for its batch; a failed, cancelled, filtered or evaluated trajectory
    ends in the ledger; a damaged delivery is quarantined. `take_back`, `withdraw` and `suspend` end
    leases early, and so does the loss of a server.
    """

    def __init__(self, run: ControlledRun, books: Books) -> None:
        self._run = run
        self._progress = run.progress
        self._book = books.leases
        self._environments = books.environments
        self._fleet = books.fleet
        self._journal = books.journal
        self._receiver = books.queue
        self._ledger = books.ledger
        self._state = books.state
        self.inspector = Inspector(run, books, run_again=self._run_again)
        self.feed = Feed(run, books)
        # The lowest and the highest reward that this controller has seen, by environment.
        self._seen: dict[str, tuple[float, float]] = {}

    def restore(self, history: RunHistory) -> None:
        """Takes over what an earlier controller has journaled and may be delivered again."""
        self.inspector.earlier = EarlierIds(history, self._journal)

    def joined(self, session: ServerSession) -> None:
        self._book.awaited.hold(self._ledger.unreceived(session.in_queue))
        undelivered = map(TrajectoryId, session.hello.undelivered)
        self._book.awaited.joined(session.name, self._ledger.unreceived(undelivered))

    def reported(self, session: ServerSession, report: fleet_pb2.ServerReport) -> None:
        num_sent = report.sent.trajectories
        arrived = self._fleet.epochs.count(session.key).num_sent
        for group in self._book.short_leases(session.key, num_sent, arrived):
            self.run_again(group, "neither delivered them nor named them unfinished")

    def lease_reported(self, session: ServerSession, report: fleet_pb2.LeaseReport) -> None:
        group_id = GroupId(report.group_id)
        unused = report.next_attempt
        self._book.closed(group_id, session.key, report.unfinished, next_attempt=unused)
        self._run.signal.notify(gathered=True)

    def lost(self, session: ServerSession) -> None:
        if not session.drained.is_set():
            self._ledger.die(session.key)
        orphans = self._book.orphan(session.key)
        for group in orphans:
            if group.purpose is Purpose.TRAINING:
                times_lost = max(group.setbacks[member] for member in group.missing)
                cause = f"its rollout server was lost, {times_lost} times"
                failure = Failure(FailureKind.INFRASTRUCTURE, cause)
                self._give_up_spent(group, group.missing, failure)
        waiting = [g for g in orphans if g.group_id in self._book.groups and not g.is_complete]
        if waiting and not self._progress.is_over:
            missing = sum(len(group.missing) for group in waiting)
            self._run.events.warn(
                f"{missing} episodes of {len(waiting)} groups wait for another server"
            )

    async def consume(self) -> None:
        """Takes deliveries until the task is cancelled."""
        while True:
            delivery = await self._receiver.get()
            decoded = None
            if len(delivery.data) > SMALL_BYTES:
                # `accept` meets a fault again and quarantines the delivery.
                with contextlib.suppress(*FAULTS):
                    decoded = await asyncio.to_thread(self.inspector.decode, delivery)
            self.accept(delivery, decoded)

    def accept(self, delivery: Delivery, decoded: Trajectory | ProtocolError | None = None) -> None:
        """Handles a delivery; one at which the controller's own code fails is quarantined."""
        trajectory = None
        self._book.awaited.arrived(delivery.trajectory_id)
        try:
            trajectory = self.inspector.take(delivery, decoded)
            if trajectory is not None:
                failure = trajectory.failure
                is_outage = failure is not None and failure.kind in OUTAGES
                if trajectory.status is not Status.CANCELLED and not is_outage:
                    self._progress.moved(gathered=True)
                self._run.signal.notify(gathered=True)
                self.feed.note(trajectory)
                self._file(trajectory)
        except FAULTS as error:
            logger.exception("delivery %s", delivery.trajectory_id)
            cause = f"the controller failed on it: {type(error).__name__}: {error}"
            self.inspector.refuse(delivery, cause, is_counted=trajectory is not None)

    def _run_again(self, name: TrajectoryName, cause: str, will_retry: bool) -> None:
        group = self._book.quarantined(name, will_retry=will_retry)
        if group is not None:
            failure = Failure(FailureKind.INFRASTRUCTURE, f"quarantined: {cause}")
            self._give_up_spent(group, [name.member], failure)

    def withdraw(self, groups: Sequence[Group], cause: str) -> None:
        """Takes groups out of the run: servers stop them; their finished members are cancelled."""
        for group in groups:
            if self._book.remove(group.group_id) is None:
                continue
            if group.purpose is Purpose.TRAINING and not self._progress.is_over:
                # At the end of a run groups stay open: the run may be resumed.
                self._journal.append(
                    kinds.Closed(group=group.group_id, how="withdrawn", cause=cause)
                )
            self._cancel_members(group, cause)
        self._run.signal.notify()

    def start_afresh(self, group: Group) -> None:
        """Abandons a group whose task is leased again; its finished members are cancelled."""
        self._book.remove(group.group_id)
        self._cancel_members(group, "its task is leased afresh")

    def take_back(self, group: Group, cause: str) -> None:
        """Ends a lease that makes no progress; its group then waits for another server.

        Members with `controller.max_attempts` setbacks get no further attempt.
        """
        if group.closed:
            self.run_again(group, cause)
            return
        session = self._fleet.find(group.holder)
        group.shunned = group.holder
        group.setbacks.update(group.running)
        self._give_up_spent(group, group.running, Failure(FailureKind.TIMEOUT, cause))
        is_set_aside = group.group_id not in self._book.groups and not group.is_complete
        if session is None or is_set_aside:
            return
        if not group.is_complete:
            self._run.events.warn(
                f"group {group.group_id} is taken back from {session.name}: {cause}"
            )
        # Members that the server reports as unfinished are leased again.
        order = fleet_pb2.CancelLease(group_id=group.group_id, reason=cause)
        session.send(fleet_pb2.ControllerMessage(cancel=order))

    def run_again(self, group: Group, cause: str) -> None:
        """Runs the members again that a closed lease left without a trajectory or a word.

        Members with `controller.max_attempts` setbacks get no further attempt.
        """
        session = self._fleet.find(group.holder)
        members = self._book.run_again(group)
        name = "a rollout server that is gone" if session is None else session.name
        self._run.events.warn(
            f"{len(members)} episodes of group {group.group_id} run again: {name} closed their "
            f"lease, and {cause}"
        )
        self._give_up_spent(group, members, Failure(FailureKind.INFRASTRUCTURE, cause))
        self._run.signal.notify()

    def _give_up_spent(self, group: Group, members: Sequence[int], failure: Failure) -> None:
        """Gives up those of `members` that have `controller.max_attempts` setbacks."""
        limit = self._run.config.controller.max_attempts
        if gone := [member for member in members if group.setbacks[member] >= limit]:
            self._give_up(group, gone, failure)

    def suspend(self, environment: str, cause: str) -> None:
        """Suspends an environment: reports it, withdraws its groups, ends its workers or client.

        Once all training environments are suspended, the watch fails the run.
        """
        entry = self._environments.entries[environment]
        entry.state = environment_pb2.ENVIRONMENT_STATE_SUSPENDED
        entry.cause = cause
        if entry.client is not None:
            entry.client.close()
        self._run.events.add(f"environment {environment} is suspended: {cause}", logging.ERROR)
        groups = [g for g in self._book.groups.values() if g.environment == environment]
        self.withdraw(groups, f"environment {environment} is suspended")
        entry.loaded_on.clear()
        self._fleet.unload(entry.spec)

    def _file(self, trajectory: Trajectory) -> None:
        group = self._book.groups.get(trajectory.group_id)
        fate = self._book.add(trajectory)
        failure = trajectory.failure
        match fate:
            case Fate.HELD:
                assert group is not None
                group.back_s[trajectory.member] = time.monotonic()
                if group.is_complete:
                    self._complete(group)
            case Fate.RETRIED:
                self._fail(trajectory)
            case Fate.FAILED:
                self._fail(trajectory)
                assert group is not None
                assert failure is not None
                self._give_up(group, [trajectory.member], failure)
            case Fate.CANCELLED:
                self._ledger.end(trajectory, TrajectoryEnd.CANCELLED, "cancelled")
            case Fate.SUPERSEDED:
                end = TrajectoryEnd.CANCELLED if failure is None else TrajectoryEnd.FAILED
                self._ledger.end(trajectory, end, "its group is over or its place is filled")

    def _complete(self, group: Group) -> None:
        if group.purpose is Purpose.EVALUATION:
            return
        entry = self._environments.entries.get(group.environment)
        rewards = [trajectory.reward for trajectory in group.in_order()]
        self.feed.complete(group.in_order())
        self._note_result(group, rewards)
        if entry is not None:
            entry.group_complete()
            entry.reward_sum += sum(rewards)
            entry.rewards += len(rewards)
        self._filter(group)

    def _note_result(self, group: Group, rewards: Sequence[float]) -> None:
        """Journals the rewards of a group, once, if its tasks are drawn by their results."""
        leased = self._state.open_groups.get(group.group_id)
        drawn = self._environments.drawn.get(group.environment)
        has_table = group.environment in self._state.task_tables
        if drawn is None or not has_table or leased is None or leased.has_result:
            return
        lowest_pass = drawn.pass_reward - (1 - FULL_REWARD)
        self._journal.append(
            kinds.TaskResult(
                group=group.group_id,
                reward=statistics.fmean(rewards),
                episodes=len(rewards),
                passed=sum(reward >= lowest_pass for reward in rewards),
            )
        )

    def _filter(self, group: Group) -> None:
        """Leaves out a group that `algorithm.filter` does not keep; its error fails the run."""
        config = self._run.config
        algorithm = config.algorithm
        rewards = [trajectory.reward for trajectory in group.in_order()]
        before = self._state.environments[group.environment].seen
        seen = [*rewards, *before, *self._seen.get(group.environment, ())]
        self._seen[group.environment] = lowest, highest = min(seen), max(seen)
        try:
            if algorithm.filter == "none" or is_trained(group.in_order(), config):
                return
        except RunFailed as error:
            self._progress.fail(str(error))
            return
        solved = is_solved(rewards, lowest=lowest, highest=highest)
        mean = statistics.fmean(rewards)
        self._book.remove(group.group_id)
        cause = f"left out by {algorithm.filter}"
        if algorithm.filter == "unequal_rewards":
            cause = "all rewards of its group are equal"
        self._journal.append(
            kinds.Closed(
                group=group.group_id,
                how="filtered",
                cause=cause,
                solved=solved,
                reward=mean,
                seen=(lowest, highest),
            )
        )
        for trajectory in group.in_order():
            self._ledger.end(trajectory, TrajectoryEnd.FILTERED, cause)
        self.judge_filtered()

    def judge_filtered(self) -> None:
        """Ends the run, failed or as solved, if too many groups were left out of one batch."""
        algorithm = self._run.config.algorithm
        filtered = self._state.filtered
        step = self._state.next_step
        is_few = len(filtered) < MOST_FILTERED_BATCHES * algorithm.groups_per_step
        # If a batch is complete or being written, the trainer is slow, and the tasks not stuck.
        has_batch = self._book.has_whole_batch or self._book.step > step
        if is_few or self._progress.is_over or has_batch:
            return
        count = (
            f"{len(filtered)} groups were left out by algorithm.filter while the batch of "
            f"step {step + 1} was formed ({_means(filtered)})"
        )
        # A group that had not full rewards shows what is not learnt yet.
        if all(group.solved for group in filtered):
            self._progress.stop(f"the task is solved: the last {count}")
        else:
            self._progress.fail(
                f"{count}, as many as {MOST_FILTERED_BATCHES} steps train; solved are those whose "
                "rewards all are 1, or the highest one that was seen above it"
            )

    def _fail(self, trajectory: Trajectory) -> None:
        failure = trajectory.failure or Failure(FailureKind.INFRASTRUCTURE, "no cause was given")
        entry = self._environments.entries.get(trajectory.environment)
        if entry is not None and failure.kind is FailureKind.BYSTANDER:
            if entry.is_news("worker", failure.message):
                self._run.events.warn(
                    f"episodes of {entry.spec.name} lost their worker and run again: "
                    f"{failure.message}"
                )
        elif entry is not None:
            entry.episodes_failed += 1
            if failure.kind in OUTAGES:
                entry.cause = failure.message
            if entry.is_news("failure", failure.message):
                self._run.events.warn(
                    f"an episode of {trajectory.environment} failed "
                    f"({failure.kind.name.lower()}): {failure.message}"
                )
        self._ledger.end(
            trajectory, TrajectoryEnd.FAILED, f"{failure.kind.name.lower()}: {failure.message}"
        )

    def _give_up(self, group: Group, members: Sequence[int], failure: Failure) -> None:
        """Marks members as failed for good; sets the whole group aside if too few are left.

        If the prompt is too long, the group is set aside as well, since all members have the same
        prompt.
        """
        is_too_long = failure.kind is FailureKind.PROMPT_TOO_LONG
        if is_too_long or not self._book.give_up(group, members):
            self._set_aside(group, members[0], failure)
            return
        self._journal.append(
            kinds.GaveUp(group=group.group_id, members=list(members), cause=failure.message)
        )
        entry = self._environments.entries.get(group.environment)
        if entry is not None and entry.is_news("partial"):
            self._run.events.warn(
                f"group {group.group_id} of environment {group.environment} goes on without "
                f"episode {members[0]}, which had its last attempt: {failure.message}; "
                "missing_members counts such episodes"
            )
        if group.is_complete:
            self._complete(group)

    def _set_aside(self, group: Group, member: int, failure: Failure) -> None:
        cause = failure.message
        blamed = failure.kind not in (*OUTAGES, FailureKind.PROMPT_TOO_LONG)
        self._book.remove(group.group_id)
        self._journal.append(
            kinds.GroupSetAside(
                group=group.group_id, task=group.task_index, cause=cause, blamed=blamed
            )
        )
        self._cancel_members(group, f"member {member} failed for good")
        if group.purpose is Purpose.EVALUATION:
            return
        name = group.environment
        task = group.task_index
        entry = self._environments.entries.get(name)
        if failure.kind is FailureKind.PROMPT_TOO_LONG:
            if entry is not None and entry.is_news("long prompt", str(task)):
                self._run.events.warn(
                    f"task {task} of environment {name} is set aside: {cause}; skipped_tasks "
                    "counts such tasks"
                )
            if entry is not None and entry.task_skipped():
                self.suspend(name, f"no task fits, the newest: {cause}")
            return
        if entry is None or entry.is_news(f"set aside: {cause}", str(task)):
            self._run.events.warn(
                f"task {task} of environment {name} is set aside: "
                f"episode {member} of {group.group_id} had its last attempt: {cause}"
            )
        number = group_number(group.group_id) or 0
        oldest = self._book.oldest_open(name)
        most_in_a_row = self._run.config.controller.max_failed_groups
        if (
            blamed
            and entry is not None
            and entry.group_failed(number, cause, oldest_open=oldest, most=most_in_a_row)
        ):
            last = (
                "its last group" if most_in_a_row == 1 else f"its last {most_in_a_row} groups all"
            )
            self.suspend(name, f"{last} failed, the newest: {cause}")

    def _cancel_members(self, group: Group, cause: str) -> None:
        session = self._fleet.find(group.holder)
        if session is not None and not group.is_complete:
            order = fleet_pb2.CancelLease(group_id=group.group_id, reason=cause)
            session.send(fleet_pb2.ControllerMessage(cancel=order))
        for trajectory in group.in_order():
            self._ledger.end(trajectory, TrajectoryEnd.CANCELLED, cause)

    def end_evaluated(self, group: Group) -> None:
        """Ends the episode of an evaluation after it was counted."""
        self._book.remove(group.group_id)
        for trajectory in group.in_order():
            self._ledger.end(trajectory, TrajectoryEnd.EVALUATED, "evaluated")


def _means(filtered: Sequence[FilteredGroup]) -> str:
    """Returns the counts and the mean reward of each environment as text."""
    groups: dict[str, list[FilteredGroup]] = {}
    for group in filtered:
        groups.setdefault(group.environment, []).append(group)
    return "; ".join(
        f"{name}: {sum(group.solved for group in members)} of {len(members)} solved, mean reward "
        f"{statistics.fmean(group.reward_mean for group in members):.3g}"
        for name, members in sorted(groups.items())
    )
