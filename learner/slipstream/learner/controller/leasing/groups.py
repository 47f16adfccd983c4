"""The state of groups that are leased to servers."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from slipstream.core.errors import ProtocolError
from slipstream.core.types import GroupId, Purpose, Trajectory
from slipstream.learner.controller.records.state import OpenGroup
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.v1 import fleet_pb2


@dataclass(frozen=True)
class RawPrompt:
    """The tokens of a prompt, and how its only reply is sampled, without an environment."""

    # uint32, little endian.
    token_ids: bytes
    sampling: fleet_pb2.SamplingSettings


@dataclass(eq=False)
class Group:
    """A group that is leased and not trained yet, or one episode that is not trained."""

    group_id: GroupId
    environment: str
    task_index: int
    seed: int
    purpose: Purpose
    size: int
    deadline_step: int
    holder: ServerKey | None
    finished: dict[int, Trajectory] = field(default_factory=dict)
    # Members that had their last attempt: the group goes on without them.
    failed: set[int] = field(default_factory=set)
    # The last attempt that ended, by member.
    attempts: dict[int, int] = field(default_factory=dict)
    # First attempt of the present lease; first attempt that no closed lease has begun.
    first_attempt: int = 0
    unused_attempt: int = 0
    # The attempts that the leases of this group allow, by the epoch of the server.
    allowed: dict[int, range] = field(default_factory=dict)
    # Number of times that the group was leased to a server.
    num_leases: int = 1
    # The server of an earlier controller that may still deliver members; empty if there is none.
    awaits: str = ""
    # Members that are missing and that the holder will not run again.
    ended: set[int] = field(default_factory=set)
    # Whether the holder has closed the lease; trajectories of the lease may still arrive.
    closed: bool = False
    # Number of trajectories that the holder had sent when it had closed the lease, if known.
    sent_at_close: int | None = None
    # The server whose lease lost members or was taken back: others come first.
    shunned: ServerKey | None = None
    # By member: number of its lost servers, leases taken back and quarantined trajectories.
    setbacks: Counter[int] = field(default_factory=Counter)
    # Monotonic times of the present lease, and by member of its trajectory's arrival; 0 and empty
    # for a group of an earlier controller.
    leased_s: float = 0.0
    back_s: dict[int, float] = field(default_factory=dict)
    # The prompt, or None if the environment gives it.
    prompt: RawPrompt | None = None

    @property
    def is_complete(self) -> bool:
        """Whether each member has finished with a reward or has no attempt left."""
        return self.num_missing == 0

    @property
    def missing(self) -> list[int]:
        """The members that have not finished with a reward and may still be attempted."""
        over = self.finished.keys() | self.failed if self.failed else self.finished
        return [member for member in range(self.size) if member not in over]

    @property
    def num_missing(self) -> int:
        return self.size - len(self.finished) - len(self.failed)

    @property
    def num_running(self) -> int:
        return len(self.running) if self.ended else self.num_missing

    @property
    def running(self) -> list[int]:
        return [member for member in self.missing if member not in self.ended]

    @property
    def judged_lease(self) -> tuple[int, int] | None:
        """The lease whose members the environment compared: epoch, and first attempt plus 1.

        None if no member was compared with others.
        """
        leases = {
            (trajectory.server_epoch, trajectory.judged_lease)
            for trajectory in self.finished.values()
        }
        return next((lease for lease in leases if lease[1]), None)

    def may_end(self, epoch: int, attempt: int) -> bool:
        """Whether an attempt belongs to the present lease; true if the group has no lease.

        The end of an attempt of an earlier lease does not end the member, which the present holder
        runs again. `epoch` is the epoch of the server that made the attempt.
        """
        if self.holder is None:
            return True
        return self.holder.epoch == epoch and attempt >= self.first_attempt

    def excess(self, epoch: int, attempt: int) -> str:
        """Returns why no lease of this group allows the attempt, or "" if a lease allows it."""
        allowed = self.allowed.get(epoch)
        if allowed is None:
            return f"{self.group_id} was never leased to the server of epoch {epoch:x}"
        if attempt not in allowed:
            return (
                f"attempt {attempt} of {self.group_id}, which was leased for attempts "
                f"{allowed.start} to {allowed.stop - 1}"
            )
        return ""

    def check_report(self, unfinished: Sequence[int], next_attempt: int) -> None:
        """Raises ProtocolError if the holder's report on its closed lease contradicts the lease.

        `unfinished` are the members that the holder did not end. `next_attempt` is larger than the
        number of every attempt that the holder made, or 0 if the report has no such number.
        """
        assert self.holder is not None
        # A server that was told to stop before it began names the first attempt of its lease.
        has_begun = next_attempt > self.first_attempt
        fault = self.excess(self.holder.epoch, next_attempt - 1) if has_begun else ""
        if max(unfinished, default=0) >= self.size:
            fault = f"member {max(unfinished)} of {self.group_id}, which has {self.size} members"
        if fault:
            raise ProtocolError(f"rollout server {self.holder.server_id} reports {fault}")

    def note_attempt(self, member: int, attempt: int) -> None:
        """Notes that an attempt of a member ended."""
        self.attempts[member] = max(self.attempts.get(member, -1), attempt)

    def fail_all_but(self, finished: Collection[int]) -> None:
        """Notes that all members but these had their last attempt."""
        self.failed = set(range(self.size)).difference(finished)

    def refill(
        self, batched: Mapping[int, Trajectory], trajectories: Mapping[int, Trajectory]
    ) -> None:
        """Takes `trajectories` of a batch's file back, in which the group was complete.

        `batched` are all of its trajectories in the file, by member.
        """
        self.fail_all_but(batched)
        self.finished.update(trajectories)
        for member, trajectory in trajectories.items():
            self.note_attempt(member, trajectory.attempt)

    def allow(self, epoch: int, first: int, count: int) -> None:
        """Allows the server of `epoch` to make the attempts `first` to `first + count - 1`."""
        before = self.allowed.get(epoch)
        start = first if before is None else min(first, before.start)
        self.allowed[epoch] = range(start, first + count)

    @property
    def next_attempt(self) -> int:
        return max(self.unused_attempt, max(self.attempts.values(), default=-1) + 1)

    def in_order(self) -> list[Trajectory]:
        """Returns the group's received trajectories, sorted by member."""
        return [self.finished[member] for member in sorted(self.finished)]


def fewest_members(size: int) -> int:
    """Returns how many members must finish: half of `size`, at least 2 (1 in a group of 1).

    An advantage that compares the members of a group needs two members.
    """
    return max(math.ceil(size / 2), min(2, size))


def reopened(record: OpenGroup, size: int, attempts_per_lease: int) -> Group:
    """Returns a group that waits for a server again, restored from the journal's `record`."""
    allowed = range(record.num_leases * attempts_per_lease)
    return Group(
        group_id=record.group_id,
        environment=record.environment,
        task_index=record.task_index,
        seed=record.seed,
        purpose=Purpose.TRAINING,
        size=size,
        deadline_step=record.deadline_step,
        holder=None,
        failed=record.failed.intersection(range(size)),
        attempts=dict(record.attempts),
        allowed=dict.fromkeys(record.epochs, allowed),
        awaits=record.server,
    )


class Fate(Enum):
    """The controller's decision about a received trajectory: keep, retry or drop it."""

    # The trajectory fills its member's place and waits for the batch.
    HELD = "held"
    # The member runs again.
    RETRIED = "retried"
    # The member had its last attempt.
    FAILED = "failed"
    CANCELLED = "cancelled"
    # The member is finished already, or the group is over.
    SUPERSEDED = "superseded"


def sampled_tokens(trajectories: Iterable[Trajectory]) -> int:
    """Returns the number of sampled tokens of all trajectories."""
    return sum(trajectory.num_sampled_tokens for trajectory in trajectories)
