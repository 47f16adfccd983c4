"""NCCL without a GPU: members in threads, whose broadcasts end when all of them have come."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

from slipstream.protocol.weights import nccl_group

from support.fakes import fake_cupy
from support.rigs.waiting import LIMIT_S


@dataclass
class Meeting:
    """All members of one unique id."""

    world_size: int
    members: set[int] = field(default_factory=set)
    # Every broadcast: the ranks that have come, and the bytes of the root.
    rounds: list[tuple[set[int], list[bytes]]] = field(default_factory=list)
    lock: threading.Condition = field(default_factory=threading.Condition)


class FakeNccl(fake_cupy.FakeCupy):
    """A cupy whose communicators meet."""

    def __init__(self) -> None:
        super().__init__()
        self.meetings: dict[bytes, Meeting] = {}
        self.members: list[Member] = []
        self.num_ids = 0
        # Ranks that cannot join.
        self.refused: set[int] = set()
        # The member whose broadcast each thread has enqueued last.
        self.newest = threading.local()

    def modules(self) -> dict[str, ModuleType]:
        all_modules = super().modules()
        room = ctypes.create_string_buffer(16)
        cuda = vars(all_modules["cupy.cuda"])
        cuda["nccl"].get_unique_id = self._unique_id
        cuda["runtime"].eventRecord = lambda event, _: event.record()
        cuda.update(
            # The memory lives as long as what refers to it.
            alloc=lambda _: SimpleNamespace(room=room, ptr=ctypes.addressof(room)),
            Event=lambda: Event(self),
            get_elapsed_time=lambda first, last: 1e3 * (last.made_s - first.made_s),
        )
        return all_modules

    def connect(self, unique_id: bytes, rank: int, world_size: int = 2) -> Member:
        """A member without a group, as soon as all have come."""
        if rank in self.refused:
            raise fake_cupy.NcclError("refused")
        meeting = self.meetings.setdefault(unique_id, Meeting(world_size))
        with meeting.lock:
            meeting.members.add(rank)
            meeting.lock.notify_all()
            meeting.lock.wait_for(
                lambda: len(meeting.members) == world_size, timeout=LIMIT_S
            )
        self.members.append(Member(self, meeting, rank))
        return self.members[-1]

    def end_meetings(self) -> None:
        """Ends the threads that were left in a meeting."""
        for meeting in self.meetings.values():
            with meeting.lock:
                meeting.members |= set(range(meeting.world_size))
                meeting.lock.notify_all()

    def _connect(self, world_size: int, unique_id: bytes, rank: int) -> Member:
        return self.connect(unique_id, rank, world_size)

    def _unique_id(self) -> bytes:
        self.num_ids += 1
        return b"id-%d" % self.num_ids


class Member:
    """Takes part in the broadcasts of its meeting, one after the other."""

    def __init__(self, nccl: FakeNccl, meeting: Meeting, rank: int) -> None:
        self.nccl = nccl
        self.meeting = meeting
        self.rank = rank
        # Memory into which each broadcast puts its bytes; a root's own memory is not written.
        self.targets: list[tuple[int, int]] = []
        self.copied = 0
        self.num_aborts = 0
        # Closed: `abort` does not come back.
        self.abort_gate = threading.Event()
        self.abort_gate.set()
        # Closed: `broadcast` itself waits, as NCCL does for connections.
        self.gate = threading.Event()
        self.gate.set()

    def broadcast(self, pointer, _, num_bytes, kind, root, stream):
        self.gate.wait()
        if self.nccl.broadcast_error is not None:
            raise self.nccl.broadcast_error
        if self.num_aborts:
            raise fake_cupy.NcclError("unhandled system error")
        with self.meeting.lock:
            place = len(self.targets)
            self.targets.append((pointer, 0 if root == self.rank else num_bytes))
            while len(self.meeting.rounds) <= place:
                self.meeting.rounds.append((set(), []))
            came, data = self.meeting.rounds[place]
            came.add(self.rank)
            if root == self.rank:
                data.append(ctypes.string_at(pointer, num_bytes))
        self.nccl.newest.member = self

    def abort(self) -> None:
        self.num_aborts += 1
        self.gate.set()
        self.abort_gate.wait()

    def progress(self) -> int:
        """Broadcasts that all members take part in; copies what they brought."""
        with self.meeting.lock:
            while self.copied < len(self.targets):
                came, data = self.meeting.rounds[self.copied]
                if len(came) < self.meeting.world_size:
                    break
                pointer, num_bytes = self.targets[self.copied]
                ctypes.memmove(pointer, data[0], num_bytes)
                self.copied += 1
            return self.copied


class Event:
    """Behind the broadcasts of the member whose broadcast this thread has enqueued last."""

    def __init__(self, nccl: FakeNccl) -> None:
        self._nccl = nccl
        self.ptr = self

    def record(self) -> None:
        self.made_s = time.monotonic()
        self._member = getattr(self._nccl.newest, "member", None)
        self._place = 0 if self._member is None else len(self._member.targets)

    @property
    def done(self) -> bool:
        return self._member is None or self._member.progress() >= self._place


@contextlib.contextmanager
def installed() -> Iterator[FakeNccl]:
    """Puts the fake in the place of cupy, and removes it afterwards."""
    with fake_cupy.installed(FakeNccl()) as fake:
        nccl_group._warm_up_room.cache_clear()
        yield fake
        fake.end_meetings()
        for thread in threading.enumerate():
            # Threads that join late, and the watchdogs of groups that were aborted.
            if thread.name.startswith("nccl-"):
                thread.join(LIMIT_S)
    nccl_group._warm_up_room.cache_clear()
