"""A pass grants what a look at all servers and all groups before each lease would grant."""

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

from slipstream.core import staleness
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.scheduler import (
    MAX_GRANTS_IN_A_PASS,
    Grant,
    LeaseWait,
    Scheduler,
)
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.servers.session import ServerSession
from support.fakes.fake_trajectories import GOOD
from support.references.plain_staleness import may_lease, must_start_afresh
from support.rigs.counted_work import counted
from support.rigs.lease_rig import Rig, take_batch

NUM_RUNS = 150
ORDER = list(LeaseWait)


class PlainScheduler(Scheduler):
    """The rule without counts: everything is looked at before each lease."""

    def lease_all(self, limit: int = 10**9) -> asyncio.Future[None] | None:
        num_abandoned = len(self._book.again)
        granted = self._orphans()
        num_abandoned = len(self._book.again) - num_abandoned
        while not isinstance(lease := self._next(), LeaseWait):
            granted.append(lease)
        self._note(lease)
        return self._journal.durable() if granted or num_abandoned else None

    def _room_of(self, session: ServerSession) -> int:
        num_running = sum(len(g.running) for g in self._book.held_by(session.key))
        num_running += sum(
            len(c.members)
            for c in self._book.closing.values()
            if c.holder == session.key
        )
        return (
            session.hello.max_episodes - num_running - self.reserved.get(session.key, 0)
        )

    def _by_room(self) -> list[ServerSession]:
        return sorted(self._fleet.serving(), key=self._room_of, reverse=True)

    def _runs(self, session: ServerSession, group: Group) -> bool:
        entry = self._environments.entries.get(group.environment)
        return entry is not None and entry.runs_on(session.key)

    def _orphans(self) -> list[Grant]:
        book = self._book
        granted = []
        for session in self._by_room():
            for group in book.orphans():
                if (
                    self._runs(session, group)
                    and len(group.missing) <= self._room_of(session)
                    and book.may_reassign(group, session.version.step)
                ):
                    book.reassign(group, session.key)
                    granted.append(self._record(session, group))
        for group in book.orphans():
            able = [s.version.step for s in self._by_room() if self._runs(s, group)]
            every = book.training_groups()
            verdicts = [book.may_reassign(group, step) for step in able]
            if must_start_afresh(
                group, every, book.step, book.groups_per_step, verdicts
            ):
                self._abandon(group)
                self._book.again.append(group)
        return granted

    def _may_lease(self, session: ServerSession) -> bool:
        book = self._book
        deadlines = [group.deadline_step for group in book.training_groups()]
        deadline = staleness.deadline(
            session.version.step, book.max_staleness, book.num_steps
        )
        return may_lease(deadlines, book.step, book.groups_per_step, deadline)

    def _next(self) -> Grant | LeaseWait:
        sessions = self._by_room()
        book = self._book
        environments = self._environments
        if not sessions:
            return LeaseWait.SERVER
        wait = LeaseWait.SLOTS
        sizes = book.group_sizes
        episodes = book.episodes_by_environment()
        if not any(self._may_lease(session) for session in sessions):
            return LeaseWait.STALENESS
        for session in sessions:
            step = session.version.step
            if self._room_of(session) < sizes.smallest:
                continue
            if not self._may_lease(session):
                wait = max(wait, LeaseWait.STALENESS, key=ORDER.index)
                continue
            old = next(
                (
                    group
                    for group in self._book.again
                    if (entry := environments.entries.get(group.environment))
                    is not None
                    and environments.may_run(entry, session.key, episodes, group.size)
                ),
                None,
            )
            turn = environments.next_for(session.key, episodes, sizes)
            if old is None and turn is None:
                wait = max(wait, LeaseWait.ENVIRONMENT, key=ORDER.index)
                continue
            name = old.environment if old is not None else turn.spec.name
            size = sizes.of(name)
            if self._room_of(session) < size:
                continue
            reserved = episodes.total() * self._largest_bytes
            free = self._config.queue.max_bytes - self._queue.waiting_bytes - reserved
            soon = sum(
                min(self.reserved.get(session.key, 0), session.hello.max_episodes)
                for session in self._fleet.sessions.values()
            )
            if (size + soon) * self._largest_bytes > free:
                return LeaseWait.QUEUE
            if old is not None:
                self._book.again.remove(old)
                group = book.lease(
                    old.environment, old.task_index, old.seed, session.key, step
                )
                return self._record(session, group, replaces=old.group_id)
            number = turn.counts.next_number
            task_index, seed = environments.next_task(turn)
            group = book.lease(turn.spec.name, task_index, seed, session.key, step)
            return self._record(session, group, number)
        return wait


def state(rig: Rig) -> tuple[object, ...]:
    """Everything that a pass decides."""
    groups = [
        (
            g.group_id,
            g.environment,
            g.task_index,
            g.seed,
            g.deadline_step,
            g.holder,
            g.num_leases,
        )
        for g in rig.book.groups.values()
    ]
    return groups, [group.group_id for group in rig.abandoned], rig.scheduler.lease_wait


class Both:
    """The same state twice: one is leased by passes, the other by the plain rule."""

    def __init__(self, random: Random, folder: Path) -> None:
        self.random = random
        sizes = {
            "group_size": self.number(2, 3),
            "groups_per_step": self.number(1, 4),
            "max_staleness": self.number(0, 2),
        }
        own_size = self.number(2, 4)
        by_environment = {"environments": {"f": {"group_size": own_size}}}
        extensions = {"by_environment": by_environment} if self.number(0, 1) else {}
        of_batch = sizes["groups_per_step"] * max(sizes["group_size"], own_size)
        queue = {"max_bytes": self.number(of_batch, 3 * of_batch) * 2240}
        self.journals = []
        self.rigs = []
        for name, kind in (("pass", Scheduler), ("plain", PlainScheduler)):
            journal = Journal(folder / name / "journal")
            self.journals.append(journal)
            rig = Rig(
                folder / name,
                journal,
                kind,
                algorithm=sizes,
                queue=queue,
                extensions=extensions,
            )
            rig.add_environment("f", 2.0)
            self.rigs.append(rig)
        step = self.number(0, 3)
        for rig in self.rigs:
            rig.book.step = step
        self.num_servers = 0

    def number(self, least: int, most: int) -> int:
        return self.random.randint(least, most)

    def any_of(self, names: list[str]) -> str | None:
        return self.random.choice(names) if names else None

    def compare(self) -> None:
        fast, plain = self.rigs
        # A group that a limit cuts off goes on with the next pass; orphans may go elsewhere then.
        limit = 10**9 if fast.book.orphans() else self.number(1, 3)
        for rig in self.rigs:
            while rig.scheduler.lease_all(limit) is not None:
                pass
        assert state(fast) == state(plain)

    def move(self) -> None:
        """Makes one random event happen to both runs in the same way."""
        names = list(self.rigs[0].fleet.sessions)
        kind = self.random.choice(
            [
                "join",
                "join",
                "lose",
                "version",
                "finish",
                "finish",
                "train",
                "reserve",
                "lose newest",
            ]
        )
        name = self.any_of(names)
        step = self.rigs[0].book.step
        group_id = self.any_of(list(self.rigs[0].book.groups))
        version = self.number(max(0, step - 2), step)
        room = self.number(0, 12)
        loaded = self.random.choice([("e",), ("f",), ("e", "f"), ()])
        member = self.number(0, 3)
        fate = self.number(0, 9)
        self.num_servers += 1
        for rig in self.rigs:
            session = rig.fleet.sessions.get(name)
            group = rig.book.groups.get(group_id)
            match kind:
                case "join":
                    rig.serving(f"s{self.num_servers}", version, room, loaded)
                case "lose" if session is not None:
                    rig.lose(session)
                case "lose newest" if session is not None:
                    for each in list(rig.fleet.sessions.values()):
                        if each.version.step > version:
                            rig.lose(each)
                case "version" if session is not None:
                    session.version = PolicyVersion(0, version)
                    session.changed()
                case "reserve" if session is not None:
                    rig.scheduler.reserved[session.key] = room % 4
                case "finish" if group is not None and group.holder is not None:
                    self._finish(rig, group, member, fate)
                case "train":
                    take_batch(rig.book)

    def _finish(self, rig: Rig, group: Group, member: int, fate: int) -> None:
        if fate == 0:
            rig.book.remove(group.group_id)
        elif fate == 1:
            rig.book.closed(group.group_id, group.holder, [member % group.size])
        elif fate > 5:
            group.finished |= dict.fromkeys(range(group.size), GOOD)
        elif member < group.size:
            group.finished[member] = GOOD


async def test_a_pass_grants_what_the_plain_rule_grants(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_RUNS):
        both = Both(Random(seed), tmp_path / str(seed))
        for _ in range(both.number(5, 25)):
            both.move()
            both.compare()
        for journal in both.journals:
            journal.__exit__(None, None, None)
        seen["given up"] += len(both.rigs[0].abandoned)
        seen["moved"] += sum(
            g.num_leases > 1 for g in both.rigs[0].book.groups.values()
        )
        seen[both.rigs[0].scheduler.lease_wait] += 1
    # Everything that a pass decides came up.
    assert min(seen["given up"], seen["moved"]) > 10
    waits = (
        LeaseWait.SLOTS,
        LeaseWait.STALENESS,
        LeaseWait.ENVIRONMENT,
        LeaseWait.QUEUE,
    )
    assert all(seen[wait.value] > 2 for wait in waits), seen


async def lines_of_passes(folder: Path, num_servers: int) -> list[int]:
    """The work of each pass that leases two groups to each server of an idle fleet."""
    lines: list[int] = []
    with Journal(folder / "journal") as journal:
        sizes = {"group_size": 16, "groups_per_step": num_servers, "max_staleness": 1}
        rig = Rig(folder, journal, algorithm=sizes, queue={"max_bytes": 1 << 40})
        for number in range(num_servers):
            rig.serving(f"s{number}", 0, max_episodes=64)
        while True:
            before = len(rig.book.groups)
            with counted() as work:
                durable = rig.scheduler.lease_all()
            if durable is None:
                break
            assert len(rig.book.groups) - before <= MAX_GRANTS_IN_A_PASS
            lines.append(work.num_lines)
            await durable
        assert len(rig.book.groups) == 2 * num_servers
        # A holder has two groups of 16 before another one has three.
        holders = Counter(group.holder for group in rig.book.groups.values())
        assert set(holders.values()) == {2}
    return lines


async def test_a_pass_over_a_big_fleet_is_short_and_the_next_one_goes_on(
    tmp_path: Path,
) -> None:
    small, large = [
        await lines_of_passes(tmp_path / str(number), number) for number in (128, 512)
    ]
    assert len(large) > len(small) > 1
    # A pass looks at each server a few times, and not again for each lease.
    assert max(large) < 3 * max(small)
