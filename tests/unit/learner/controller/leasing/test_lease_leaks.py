"""No slot and no byte stays reserved without a lease, whatever happens to leases in any order."""

import dataclasses
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.types import (
    Failure,
    FailureKind,
    GroupId,
    ServerId,
    Status,
    Trajectory,
    TrajectoryName,
)
from slipstream.learner.controller.leasing.groups import Fate, Group
from slipstream.learner.controller.servers.session import ServerKey
from support.fakes.fake_trajectories import GOOD
from support.rigs.fuzz_budget import times
from support.rigs.lease_rig import book_of

SIZE = 3
NAMES = ("a", "b")
FAILURE = Failure(FailureKind.ENVIRONMENT, "broken")


@dataclass
class Message:
    """A message on its way to the controller: a trajectory, or a closed lease's unfinished rest."""

    server: ServerKey
    group_id: GroupId
    trajectory: Trajectory | None = None
    unfinished: tuple[int, ...] = ()
    next_attempt: int = 0
    # The message arrives, but cannot be read.
    is_spoilt: bool = False


@dataclass
class Lease:
    """A lease that a server holds: members that run, and results without a verdict."""

    group: Group
    attempt: int
    running: set[int]
    unfinished: set[int] = field(default_factory=set)


class World:
    """Servers as `dispatcher` makes them, a book, and the order of things in a test's hands."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.book = book_of(
            groups_per_step=4, group_size=SIZE, max_staleness=4, num_steps=99
        )
        self.epoch = 0
        self.servers: dict[ServerKey, dict[GroupId, Lease]] = {}
        self.travelling: list[Message] = []
        for name in NAMES:
            self.join(name)

    def join(self, name: str) -> None:
        self.epoch += 1
        self.servers[ServerKey(ServerId(name), self.epoch)] = {}

    def pick(self, options: list) -> object:
        return self.data.draw(st.sampled_from(options)) if options else None

    def grant(self, key: ServerKey, group: Group) -> None:
        running = set(group.missing)
        lease = Lease(group, group.next_attempt, running, set(running))
        self.servers[key][group.group_id] = lease

    def lease(self) -> None:
        key = self.pick(list(self.servers))
        orphan = self.pick(self.book.orphans())
        if orphan is not None:
            self.book.reassign(orphan, key)
            self.grant(key, orphan)
        elif self.book.may_lease(0):
            self.grant(key, self.book.lease("e", 0, 0, key, 0))

    def end(self) -> None:
        """An episode ends, well or not."""
        choice = self.pick(
            [
                (key, lease, member)
                for key, leases in self.servers.items()
                for lease in leases.values()
                for member in sorted(lease.running)
            ]
        )
        if choice is None:
            return
        key, lease, member = choice
        how = self.data.draw(
            st.sampled_from(["good", "retry", "failed", "cancelled", "unstarted"])
        )
        self.end_as(key, lease, member, how)

    def end_as(self, key: ServerKey, lease: Lease, member: int, how: str) -> None:
        if how != "unstarted":
            trajectory = self.trajectory(key, lease, member, how)
            spoilt = self.data.draw(st.integers(0, 7)) == 0
            self.travelling.append(
                Message(key, lease.group.group_id, trajectory, is_spoilt=spoilt)
            )
        if how == "retry":
            lease.attempt += 1
            return
        lease.running.discard(member)
        if how in ("good", "failed"):
            lease.unfinished.discard(member)
        if not lease.running:
            del self.servers[key][lease.group.group_id]
            unfinished = tuple(sorted(lease.unfinished))
            self.travelling.append(
                Message(
                    key,
                    lease.group.group_id,
                    unfinished=unfinished,
                    next_attempt=lease.attempt + 1,
                )
            )

    def trajectory(
        self, key: ServerKey, lease: Lease, member: int, how: str
    ) -> Trajectory:
        group = lease.group
        status = {"good": Status.COMPLETED, "cancelled": Status.CANCELLED}.get(
            how, Status.FAILED
        )
        return dataclasses.replace(
            GOOD,
            group_id=group.group_id,
            member=member,
            attempt=lease.attempt,
            server_id=key.server_id,
            server_epoch=key.epoch,
            status=status,
            failure=FAILURE if status is Status.FAILED else None,
            will_retry=how == "retry",
        )

    def arrive(self) -> None:
        """Trajectories and reports travel apart: any of them may be first."""
        message = self.pick(self.travelling)
        if message is not None:
            self.travelling.remove(message)
            self.take(message)

    def take(self, message: Message) -> None:
        trajectory = message.trajectory
        if trajectory is None:
            if message.server in self.servers:
                self.book.closed(
                    message.group_id,
                    message.server,
                    message.unfinished,
                    next_attempt=message.next_attempt,
                )
        elif message.is_spoilt:
            name = TrajectoryName.parse(trajectory.trajectory_id)
            assert name is not None
            self.book.quarantined(name, will_retry=trajectory.will_retry)
        elif self.book.add(trajectory) is Fate.FAILED:
            self.fail(self.book.groups[trajectory.group_id], trajectory.member)

    def fail(self, group: Group, member: int) -> None:
        if not self.book.give_up(group, [member]):
            self.withdraw(group)

    def lose_patience(self) -> None:
        """A member has no attempt left, whether or not its server still runs it."""
        group = self.pick([g for g in self.book.groups.values() if g.missing])
        if group is not None:
            self.fail(group, self.pick(group.missing))

    def withdraw(self, group: Group) -> None:
        self.book.remove(group.group_id)

    def give_up(self) -> None:
        group = self.pick(list(self.book.groups.values()))
        if group is not None:
            self.withdraw(group)

    def lose(self) -> None:
        """A server dies: its reports go with it, what it has sent may arrive."""
        key = self.pick(list(self.servers))
        del self.servers[key]
        self.travelling = [
            m for m in self.travelling if m.server != key or m.trajectory
        ]
        self.book.orphan(key)
        self.join(key.server_id)

    def check(self) -> None:
        for key, leases in self.servers.items():
            running = sum(len(lease.running) for lease in leases.values())
            assert self.book.episodes_by_holder()[key] >= running
        coming = sum(
            len(lease.running) for of in self.servers.values() for lease in of.values()
        )
        assert self.book.promised_episodes >= coming

    def settle(self) -> None:
        """Everything ends and arrives."""
        for key, leases in self.servers.items():
            for lease in list(leases.values()):
                for member in sorted(lease.running):
                    self.end_as(key, lease, member, "cancelled")
        while self.travelling:
            self.take(self.travelling.pop(0))


@settings(max_examples=times(150))
@given(st.data())
def test_what_a_lease_reserved_is_free_when_all_has_ended(data: st.DataObject) -> None:
    world = World(data)
    acts = {
        "lease": world.lease,
        "end": world.end,
        "arrive": world.arrive,
        "give up": world.give_up,
        "lose patience": world.lose_patience,
        "lose": world.lose,
    }
    for name in data.draw(
        st.lists(st.sampled_from([*acts, "end", "arrive", "lease"]), max_size=60)
    ):
        acts[name]()
        world.check()
    world.settle()
    book = world.book
    assert book.closing == {}
    assert [book.episodes_by_holder()[key] for key in world.servers] == [0, 0]
    # All missing members are in groups that the next server can take.
    unfinished = [group for group in book.groups.values() if not group.is_complete]
    assert book.orphans() == unfinished
    assert book.promised_episodes == sum(len(group.missing) for group in unfinished)
