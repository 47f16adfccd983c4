"""The state of a run, rebuilt only from the records of its journal.

Any prefix of a journal gives a state in which no group is lost and none can be trained twice: every
leased group is open, or in exactly one batch, or closed for good. The module uses no clock and no
I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue
from slipstream.core.errors import ProtocolError
from slipstream.core.types import ServerId, TrajectoryId
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.kinds import Record, ServerTokens, parsed
from slipstream.learner.controller.records.seen_ids import GroupSteps, SeenIds
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.servers.server_epochs import MAX_GAP, ServerEpochs
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.protocol.bounds import one_line, shown
from slipstream.protocol.queue.base import Amount

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
    # The largest number of each journaled gap that no server can have caused.
    ignored_gaps: dict[ServerKey, int] = field(default_factory=dict)
    # The trajectories that ended or are in a batch, and by how much the writer's last count of them
    # was larger.
    settled: Amount = Amount()
    unread: Amount = Amount()

    def add(self, record: Record) -> None:
        """Takes the next record; raises ProtocolError if it contradicts the records before it."""
        self.apply(record)
        self.settled = settled_by(self.settled, record)
        match record:
            case kinds.Lease() | kinds.EvaluationLease():
                self.servers.join(ServerKey(ServerId(record.server), record.epoch))
            case kinds.End():
                self.ended.add(TrajectoryId(record.id))
                if record.server is not None and record.epoch is not None:
                    self._receive([(record.server, record.epoch, record.tokens or 0)])
            case kinds.Batch():
                for group_id in record.groups:
                    self.trained_in.add(group_id, record.step)
                self._receive(record.tokens)
            case kinds.BatchSetAside():
                for group_id in [g for g, *_ in record.groups] + [g for g, *_ in record.put_back]:
                    self.trained_in.discard(group_id)
                for trajectory_id in record.ids:
                    self.ended.add(TrajectoryId(trajectory_id))
                # These tokens count again with the later batch or end of their trajectories.
                self._receive(record.put_back_tokens, sign=-1)
            case kinds.Servers():
                self._servers(record)
            case kinds.Start():
                self._start(record)
            case kinds.Queue():
                self.queue_added = record.added or 0

    def _receive(self, tokens: Iterable[ServerTokens], *, sign: int = 1) -> None:
        for name, epoch, number in tokens:
            self.servers.count(ServerKey(ServerId(name), epoch)).received += sign * number

    def _start(self, record: kinds.Start) -> None:
        if record.format != FORMAT:
            raise ProtocolError(
                f"the journal has format {record.format}, this version reads {FORMAT}"
            )
        self.servers.all_died()
        self.run_id = record.run_id
        self.starts += 1

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
