"""NCCL without a GPU: members in threads, whose broadcasts end when all of them have come."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass, field

from slipstream.core.errors import WeightSyncError

from support.rigs.waiting import LIMIT_S


@dataclass
class Meeting:
    """All members of one unique id."""

    world_size: int
    members: set[int] = field(default_factory=set)
    # Each broadcast: the ranks that have come, and the bytes of the root.
    rounds: list[tuple[set[int], list[bytes]]] = field(default_factory=list)
    lock: threading.Condition = field(default_factory=threading.Condition)


class FakeNccl:
    """One process' library. `meetings` is what the members share."""

    def __init__(self, meetings: dict[bytes, Meeting]) -> None:
        self._meetings = meetings
        self.made: list[FakeCommunicator] = []
        self._room = ctypes.create_string_buffer(8)

    def use(self) -> None:
        """Nothing to choose from."""

    def connect(self, unique_id: bytes, *, rank: int, world_size: int) -> FakeCommunicator:
        meeting = self._meetings.setdefault(unique_id, Meeting(world_size))
        if world_size != meeting.world_size:
            raise WeightSyncError("the members disagree on their number")
        with meeting.lock:
            meeting.members.add(rank)
            meeting.lock.notify_all()
            meeting.lock.wait_for(lambda: len(meeting.members) == world_size, timeout=LIMIT_S)
        made = FakeCommunicator(meeting, rank)
        self.made.append(made)
        return made

    def warm_up_room(self) -> tuple[int, int, int]:
        return ctypes.addressof(self._room), len(self._room), 0

    def mark(self, stream: int) -> FakeMark:
        return FakeMark(self.made[-1], len(self.made[-1].targets))


class FakeCommunicator:
    """Takes part in the broadcasts of its meeting, one after the other."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank
        # Where each broadcast puts its bytes; a root's own memory is not written.
        self.targets: list[tuple[int, int]] = []
        self.copied = 0
        self.num_aborts = 0
        # Closed: `abort` does not come back.
        self.abort_gate = threading.Event()
        self.abort_gate.set()
        # Closed: `broadcast` itself waits, as NCCL does for connections.
        self.gate = threading.Event()
        self.gate.set()

    def broadcast(self, pointer: int, num_bytes: int, root: int, stream: int) -> None:
        self.gate.wait()
        if self.num_aborts:
            raise WeightSyncError("unhandled system error")
        with self.meeting.lock:
            place = len(self.targets)
            self.targets.append((pointer, 0 if root == self.rank else num_bytes))
            while len(self.meeting.rounds) <= place:
                self.meeting.rounds.append((set(), []))
            came, data = self.meeting.rounds[place]
            came.add(self.rank)
            if root == self.rank:
                data.append(ctypes.string_at(pointer, num_bytes))

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


class FakeMark:
    """Behind the broadcasts so far."""

    def __init__(self, communicator: FakeCommunicator, place: int) -> None:
        self._communicator, self._place = communicator, place
        self._made_s = time.monotonic()

    def is_done(self) -> bool:
        return self._communicator.progress() >= self._place

    def seconds_since(self, before: FakeMark) -> float:
        return self._made_s - before._made_s
