import random

import pytest
from slipstream.core.errors import ProtocolError
from slipstream.core.types import ServerId, TrajectoryId
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.kinds import TrajectoryEnd
from slipstream.learner.controller.records.ledger import TokenLedger
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.protocol.queue.base import Tally
from slipstream.v1 import fleet_pb2
from support.rigs.lease_rig import ledger_of, note_end


def key_of(epoch: int, name: str = "a") -> ServerKey:
    return ServerKey(ServerId(name), epoch)


def departed(
    num_epochs: int, *, max_apart: int = 4, drained: bool = False
) -> ServerEpochs:
    """Epochs 1, 2, ... that each reported 100 tokens, delivered 60 and departed."""
    epochs = ServerEpochs(max_apart=max_apart)
    for epoch in range(1, num_epochs + 1):
        count = epochs.join(key_of(epoch))
        count.reported = 100
        count.ended = 100
        count.received = 60
        count.dead = not drained
        epochs.depart(key_of(epoch))
    return epochs


def test_the_newest_departed_epochs_have_counts_of_their_own():
    epochs = departed(10)
    assert [epochs.count(key_of(n)).received for n in range(7, 11)] == [60] * 4
    # The six before share one.
    assert epochs.count(key_of(1)).received == epochs.count(key_of(6)).received == 360
    assert len(list(epochs.counts())) == 5


def test_every_epoch_is_known_however_long_ago_it_joined():
    epochs = departed(5000)
    assert all(epochs.was_given(n) for n in range(1, 5001))
    assert not epochs.was_given(0)
    assert not epochs.was_given(5001)
    assert key_of(1) in epochs
    assert key_of(5000) in epochs
    assert key_of(5000, "b") not in epochs
    assert key_of(5001) not in epochs
    assert epochs.server_of(5000) == key_of(5000)
    assert epochs.server_of(1) is None


def test_what_arrives_late_is_not_lost_any_more():
    ledger = ledger_of(departed(10), 680)
    assert (ledger.snapshot().generated, ledger.snapshot().lost) == (1000, 400)
    for number in (1, 10):
        assert ledger.receive(key_of(number), TrajectoryId(f"late {number}"), 40)
    now = ledger.snapshot()
    assert (now.generated, now.lost, now.queued, now.difference) == (1000, 320, 680, 0)


def test_what_a_server_that_left_in_order_has_sent_is_queued_until_it_is_long_gone():
    ledger = ledger_of(departed(4, drained=True), 240)
    assert (ledger.snapshot().queued, ledger.snapshot().lost) == (400, 0)
    ledger = ledger_of(departed(5, drained=True), 300)
    assert (ledger.snapshot().queued, ledger.snapshot().lost) == (460, 40)
    assert ledger.snapshot().difference == 0


def test_only_connected_servers_whose_counts_changed_are_journaled_at_a_step():
    epochs = departed(10, drained=True)
    epochs.join(key_of(11)).reported = 5
    epochs.join(key_of(12)).reported = 7
    records: list[dict] = []
    ledger = ledger_of(epochs, records=records)
    ledger.journal_servers()
    assert records == [{"kind": "servers", "generated": [["a", 11, 5], ["a", 12, 7]]}]
    epochs.join(key_of(12)).reported = 9
    ledger.journal_servers()
    assert records.pop() == {"kind": "servers", "generated": [["a", 12, 9]]}
    ledger.journal_servers()
    assert len(records) == 1
    # The last record says all of a server that is lost.
    ledger.journal_servers(key_of(11))
    assert records[1] == {
        "kind": "servers",
        "generated": [["a", 11, 5]],
        "departed": True,
    }


def records_of(
    ledger: TokenLedger, epochs: ServerEpochs, records: list[dict], *, marked: bool
) -> list[dict]:
    """The journal of a random run with 3,000 servers; `marked` as departures are marked now.

    `records` is the list to which `ledger` journals.
    """
    draw = random.Random(3)
    records.append({"kind": "start", "format": 1, "run_id": "r"})
    for epoch in range(1, 3001):
        key = key_of(epoch, f"s{epoch % 30}")
        ended = draw.choice((0, 7, 50))
        # Known by its lease before anything else.
        records.append(
            {"kind": "evaluation_lease", "server": key.server_id, "epoch": epoch}
        )
        report = fleet_pb2.ServerReport(ended_tokens=ended)
        report.in_flight_tokens = draw.randrange(9)
        report.generated_tokens = ended + report.in_flight_tokens
        report.ended_episodes = 1
        report.sent.MergeFrom(Tally(1, ended).to_pb())
        ledger.report(key, report)
        late = key_of(max(1, epoch - draw.choice((0, 0, 1, 1500))))
        late = key_of(late.epoch, f"s{late.epoch % 30}")
        name = TrajectoryId(f"g{epoch:06d}.0.0.{late.epoch:x}")
        assert ledger.receive(late, name, ended)
        note_end(ledger, TrajectoryEnd.FAILED, ended)
        end = {"id": name, "end": "failed", "cause": "x", "tokens": ended}
        records.append(
            {"kind": "end", **end, "server": late.server_id, "epoch": late.epoch}
        )
        ledger.journal_servers(key)
        if not marked:
            del records[-1]["departed"]
        ledger.die(key)
        epochs.depart(key)
    return records


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_gap_of_a_server_stays_open_after_a_resume(is_lost: bool) -> None:
    epochs = ServerEpochs()
    key = key_of(1)
    records: list[dict] = [{"kind": "start", "format": 1, "run_id": "r"}]
    ledger = ledger_of(epochs, records=records)
    # The engine made 12 tokens; a record has 10, of which the queue was given 4.
    report = fleet_pb2.ServerReport(
        generated_tokens=12, ended_tokens=10, ended_episodes=2
    )
    report.sent.MergeFrom(Tally(1, 4).to_pb())
    ledger.report(key, report)
    assert ledger.receive(key, TrajectoryId("g000001.0.0.1"), 4, Tally(2, 7))
    note_end(ledger, TrajectoryEnd.FAILED, 4)
    server = {"server": key.server_id, "epoch": key.epoch}
    records.append({"kind": "evaluation_lease", **server})
    end = {"id": "g000001.0.0.1", "end": "failed", "cause": "x", "tokens": 4}
    records.append({"kind": "end", **end, **server})
    ledger.journal_servers(key if is_lost else None)
    ledger.die(key)
    epochs.depart(key)
    history = read_history(records)
    resumed = ledger_of(ServerEpochs(), state=history)
    resumed.restore(history)
    before = ledger.snapshot()
    after = resumed.snapshot()
    assert after.gaps == before.gaps
    assert len(after.gaps) == 3
    assert (after.difference, after.lost) == (before.difference, before.lost) == (11, 0)


@pytest.mark.parametrize("marked", [True, False])
def test_a_resume_counts_what_the_controller_counted(marked: bool):
    epochs = ServerEpochs()
    records: list[dict] = []
    ledger = ledger_of(epochs, records=records)
    history = read_history(records_of(ledger, epochs, records, marked=marked))
    # A journal without marks is folded when it has been read.
    assert len(list(history.servers.counts())) == (1001 if marked else 3001)
    resumed = ledger_of(ServerEpochs(), state=history)
    resumed.restore(history)
    before = ledger.snapshot()
    after = resumed.snapshot()
    assert before.difference == after.difference == 0
    assert (after.failed, after.queued) == (before.failed, 0)
    assert len(list(resumed._epochs.counts())) == 1001
    if marked:
        assert (after.generated, after.lost) == (before.generated, before.lost)


def test_gaps_of_any_number_of_epochs_fit_the_fields_of_a_message():
    epochs = ServerEpochs(max_apart=10)
    ledger = ledger_of(epochs)
    amount = Tally(10**15, 10**15)
    for epoch in range(1, 20_001):
        key = key_of(epoch)
        epochs.join(key)
        assert ledger.receive(key, TrajectoryId(f"g000001.0.0.{epoch:x}"), 0, amount)
        ledger.die(key)
        epochs.depart(key)
    for epoch in range(20_001, 30_001):
        key = key_of(epoch)
        ledger.report(key, fleet_pb2.ServerReport(generated_tokens=10**15))
    now = ledger.snapshot()
    assert now.generated == now.lost == now.difference == 2**63 - 1


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("servers", {"generated": [["a", 1, 2**64]]}),
        ("gave_up", {"group": "g000000", "members": [-(2**70)]}),
        ("closed", {"group": "g000000", "how": "filtered", "reward": 10**400}),
    ],
)
def test_a_record_with_a_number_of_more_than_64_bits_is_refused(kind, fields):
    start = {"kind": "start", "format": 1, "run_id": "r"}
    with pytest.raises(
        ProtocolError, match=r"^line 2 of the journal is no record .* 64 bits, got"
    ):
        read_history([start, {"kind": kind, **fields}])
