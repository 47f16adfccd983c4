"""Which trajectories were delivered: exactly, for ever, in little memory."""

import copy
import random
import tracemalloc

from slipstream.core.types import GroupId, ServerId, TrajectoryId
from slipstream.learner.controller.records.seen_ids import GroupSteps, SeenIds
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.server_states import ServerKey
from support.rigs.lease_rig import ledger_of

KEY = ServerKey(ServerId("a"), 0x1234567890ABCDEF)
# Bytes of a trajectory that is remembered, at most.
MOST_BYTES = 4


def any_id(source: random.Random) -> TrajectoryId:
    """Draws from few ids, so that many come twice; most are first attempts, some are foreign."""
    group = source.choice(["g000001", "g000256", "e1-000001", "e12-000001", "g1", "g0000001", "x"])
    member, attempt = source.choice([0, 1, 15, 63, 64, 200]), source.choice([0, 0, 0, 1, 2])
    epoch = source.choice(["1", "2", "ffffffffffffffff", "01", "A"])
    text = f"{group}.{member}.{attempt}.{epoch}"
    return TrajectoryId(source.choice([text] * 8 + [f"{group}.00.0.{epoch}", "", f" {text}"]))


def test_it_is_a_set_whatever_the_ids_are() -> None:
    source = random.Random(5)
    for _ in range(40):
        seen, plain = SeenIds(), set()
        for _ in range(150):
            added, asked = any_id(source), any_id(source)
            assert seen.add(added) == (added not in plain)
            plain.add(added)
            assert (asked in seen) == (asked in plain), asked
        other = copy.deepcopy(seen)
        other.add(TrajectoryId("g000009.0.0.1"))
        assert TrajectoryId("g000009.0.0.1") not in seen
        assert all(each in other for each in plain)


def test_ids_that_nobody_made_take_little_room() -> None:
    tracemalloc.start()
    seen = SeenIds()
    for n in range(100):
        seen.add(TrajectoryId(f"g{10**11 + 1000 * n}.999999999.0.1"))
    assert tracemalloc.get_traced_memory()[0] < 100 * 10_000
    tracemalloc.stop()
    assert TrajectoryId(f"g{10**11}.999999999.0.1") in seen


def test_a_ledger_takes_few_bytes_a_trajectory_and_knows_each() -> None:
    ledger, num_groups, size = ledger_of(ServerEpochs()), 1000, 16
    ids = [
        f"g{number:06d}.{member}.0.1234567890abcdef"
        for number in range(num_groups)
        for member in range(size)
    ]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for text in ids:
        assert ledger.receive(KEY, TrajectoryId(text), 1)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown / len(ids) < MOST_BYTES, grown / len(ids)
    assert not any(ledger.receive(KEY, TrajectoryId(text), 1) for text in ids)


def test_the_step_of_each_group_is_known_and_of_nothing_else() -> None:
    steps = GroupSteps()
    steps.add(GroupId("g000002"), 7)
    assert steps.get(GroupId("g000002")) == 7
    assert [steps.get(GroupId(text)) for text in ("g000001", "g000003", "g2", "e1-000002", "")] == [
        None
    ] * 5
