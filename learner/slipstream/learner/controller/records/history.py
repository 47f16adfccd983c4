"""The state of a run, rebuilt only from the records of its journal.

Any prefix of a journal gives a state in which no group is lost and none can be trained twice: every
leased group is open, or in exactly one batch, or closed for good. The module uses no clock and no
I/O.
"""

import functools
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import JsonValue
from slipstream.core.errors import ProtocolError
from slipstream.core.types import GroupId, ServerId, TrajectoryId, TrajectoryName
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.kinds import Record, ServerTokens, UnknownFact, parsed
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.protocol.bounds import one_line, shown
from slipstream.protocol.queue.base import Tally
from slipstream.protocol.release import OURS, unknown_fact

# Groups of one page; a forged id costs at most one page.
PAGE = 256
# Number of members of a group that share a word.
WORD = 64
_NUMBERED = re.compile(r"(g|e[0-9]+-)(0[0-9]{5}|[1-9][0-9]{5,11})")


class SeenIds:
    """An exact set of trajectory ids that takes about a byte per id.

    Most ids are the first attempt of a member by the only server that ran its group. Such an id is
    one bit, stored next to the epoch of that server. All others are kept as text.
    """

    def __init__(self) -> None:
        # Epochs and bits, by the kind of group, page of its number and word of its member.
        self._pages: dict[tuple[str, int, int], tuple[array[int], array[int]]] = {}
        self._others: set[TrajectoryId] = set()

    def add(self, trajectory_id: TrajectoryId) -> bool:
        """Adds an id; returns False if the set already has it."""
        place = _place(trajectory_id)
        if place is not None:
            page, index, epoch, bit = place
            if page not in self._pages:
                zeros = bytes(8 * PAGE)
                self._pages[page] = array("Q", zeros), array("Q", zeros)
            epochs, bits = self._pages[page]
            if not bits[index]:
                epochs[index] = epoch
            if epochs[index] == epoch:
                is_new = not bits[index] & bit
                bits[index] |= bit
                return is_new
        is_new = trajectory_id not in self._others
        self._others.add(trajectory_id)
        return is_new

    def stored(self) -> list[object]:
        """Returns the content as plain values, for `restored`."""
        pages = [
            (*page, epochs.tobytes(), bits.tobytes())
            for page, (epochs, bits) in self._pages.items()
        ]
        return [pages, sorted(self._others)]

    @classmethod
    def restored(cls, stored: Sequence[Any]) -> Self:
        """Returns the set whose content `stored` returned."""
        seen = cls()
        pages, other_ids = stored
        for kind, number, word, epochs, bits in pages:
            seen._pages[kind, number, word] = array("Q", epochs), array("Q", bits)
        seen._others.update(other_ids)
        return seen

    def __contains__(self, trajectory_id: TrajectoryId) -> bool:
        if not self._pages and not self._others:
            return False
        place = _place(trajectory_id)
        if place is not None and place[0] in self._pages:
            page, index, epoch, bit = place
            epochs, bits = self._pages[page]
            if epochs[index] == epoch and bits[index] & bit:
                return True
        return trajectory_id in self._others


def group_number(group_id: str) -> int | None:
    """Returns the number in the id of a training group, or None for any other text."""
    numbered = _NUMBERED.fullmatch(group_id)
    return int(numbered[2]) if numbered is not None and numbered[1] == "g" else None


class GroupSteps:
    """The step that trains each group, stored in four bytes per group."""

    def __init__(self) -> None:
        self._steps = array("i")

    def stored(self) -> bytes:
        """Returns the content as bytes, for `restored`."""
        return self._steps.tobytes()

    @classmethod
    def restored(cls, stored: bytes) -> Self:
        """Returns the steps whose content `stored` returned."""
        steps = cls()
        steps._steps.frombytes(stored)
        return steps

    def add(self, group_id: GroupId, step: int) -> None:
        """Notes the step that trains a group, -1 for none; group numbers have no gaps."""
        number = group_number(group_id)
        assert number is not None, group_id
        self._steps.extend([-1] * (number + 1 - len(self._steps)))
        self._steps[number] = step

    def get(self, group_id: GroupId) -> int | None:
        """Returns the step of the group, or None if it is in no batch or is no training group."""
        number = group_number(group_id)
        if number is None or number >= len(self._steps) or self._steps[number] < 0:
            return None
        return self._steps[number]


# A delivered id is looked up in several sets, one after the other.
@functools.lru_cache(maxsize=32)
def _place(trajectory_id: str) -> tuple[tuple[str, int, int], int, int, int] | None:
    """Returns (page, index in the page, epoch, bit) of a first attempt's id, or None for others."""
    name = TrajectoryName.parse(trajectory_id)
    if name is None or name.attempt:
        return None
    numbered = _NUMBERED.fullmatch(name.group_id)
    if numbered is None or trajectory_id != f"{name.group_id}.{name.member}.0.{name.epoch:x}":
        return None
    page, index = divmod(int(numbered[2]), PAGE)
    word, bit = divmod(name.member, WORD)
    return (numbered[1], page, word), index, name.epoch, 1 << bit


FORMAT = 1
# Advice for the user if a journal or a batch is damaged.
REMEDY = "put it back from a copy of the run, or begin anew with another run.name"


@dataclass
class RunHistory(RunState):
    """The state of a run at the end of its journal, with what only the next start asks."""

    run_id: str = ""
    # Number of controller starts.
    starts: int = 0
    # Number of entries that Redis had ever counted at the last start; None without Redis.
    queue_added: int | None = None
    trained_in: GroupSteps = field(default_factory=GroupSteps)
    ended: SeenIds = field(default_factory=SeenIds)
    # Every server that joined, with its tokens of trajectories that ended or are in a batch.
    servers: ServerEpochs = field(default_factory=ServerEpochs)
    # The trajectories that ended or are in a batch, and by how much the writer's last count of them
    # was larger.
    settled: Tally = Tally()
    unread: Tally = Tally()

    def add(self, record: Record) -> None:
        """Takes the next record; raises ProtocolError if it contradicts the records before it."""
        self.apply(record)
        self.settled = settled_by(self.settled, record)
        match record:
            case kinds.GroupLease() | kinds.EvaluationLease():
                self.servers.join(ServerKey(ServerId(record.server), record.epoch))
            case kinds.End():
                self.ended.add(TrajectoryId(record.id))
                self._receive([(record.server, record.epoch, record.tokens)])
            case kinds.StepBatch():
                for group_id in record.groups:
                    self.trained_in.add(group_id, record.step)
                self._receive(record.tokens)
            case kinds.BatchSetAside():
                for group_id in [g for g, *_ in record.groups] + [g for g, *_ in record.put_back]:
                    self.trained_in.add(group_id, -1)
                for trajectory_id in record.ids:
                    self.ended.add(TrajectoryId(trajectory_id))
                # The tokens count again with the later batch or end of their trajectories.
                self._receive(record.put_back_tokens, sign=-1)
            case kinds.Servers():
                self._servers(record)
            case kinds.Start():
                if record.format != FORMAT:
                    raise ProtocolError(unknown_fact("the journal", f"format {record.format}"))
                self.servers.all_died()
                self.run_id = record.run_id
                self.starts += 1
            case kinds.QueueStart():
                self.queue_added = record.added

    def _receive(self, tokens: Iterable[ServerTokens], *, sign: int = 1) -> None:
        for name, epoch, number in tokens:
            self.servers.count(ServerKey(ServerId(name), epoch)).received += sign * number

    def _servers(self, record: kinds.Servers) -> None:
        if record.settled is not None:
            self.unread = Tally(*record.settled).less(self.settled)
        gaps = {(name, epoch): numbers for name, epoch, numbers in record.gaps}
        for name, epoch, generated in record.generated:
            key = ServerKey(ServerId(name), epoch)
            count = self.servers.join(key)
            count.take_gaps(gaps.get((name, epoch), (0,) * 5))
            count.reported = max(count.reported, generated)
            if record.departed:
                self.servers.depart(key)


def settled_by(settled: Tally, record: Record) -> Tally:
    """Returns the amount that has ended or is in a batch, after one more record.

    `settled` is this amount before the record, in trajectories and tokens.
    """
    match record:
        case kinds.End():
            return settled.plus(record.tokens)
        case kinds.StepBatch():
            tokens = sum(tokens for *_, tokens in record.tokens)
            return settled.less(Tally(-record.trajectories, -tokens))
        case kinds.BatchSetAside():
            tokens = sum(tokens for *_, tokens in record.put_back_tokens)
            return settled.less(Tally(record.put_back_trajectories, tokens))
    return settled


def read_history(
    records: Iterable[Mapping[str, JsonValue]],
    history: RunHistory | None = None,
    *,
    line: int = 0,
) -> RunHistory:
    """Returns the state after all records; raises ProtocolError if a record is not valid.

    `history` is the state after `line` records before them, which takes the others up.
    """
    history = history or RunHistory()
    wrote = ""
    for number, record in enumerate(records, start=line + 1):
        if number == 1 and record["kind"] != "start":
            raise ProtocolError("the journal was written by an older version: it has no start")
        try:
            if record["kind"] == "start" and isinstance(packages := record.get("packages"), dict):
                wrote = f", by {OURS} {packages.get(OURS)},"
            history.add(parsed(record))
        except UnknownFact as error:
            what = f"line {number} of the journal{wrote}"
            raise ProtocolError(unknown_fact(what, str(error))) from error
        except (ArithmeticError, LookupError, ValueError) as error:
            kind = shown(str(record["kind"]))
            cause = one_line(str(error), 200)
            raise ProtocolError(
                f"line {number} of the journal is no record {kind}: {cause}; {REMEDY}"
            ) from error
    return history
