"""Which trajectories were delivered: exactly, for ever, in little memory."""

import copy
import json
import random
import tracemalloc

import pytest
from slipstream.core.errors import ProtocolError
from slipstream.core.types import GroupId, PolicyVersion, ServerId, TrajectoryId
from slipstream.learner.controller.loop import version_of
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import (
    GroupSteps,
    RunHistory,
    SeenIds,
    read_history,
)
from slipstream.learner.controller.records.kinds import TrajectoryEnd, fields_of, parsed
from slipstream.learner.controller.records.recorded_steps import JournaledStep
from slipstream.learner.controller.records.state import is_solved
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.session import ServerKey
from support.fakes.journal_records import batch_record, lease_record
from support.rigs.fuzz_files import RECORDS
from support.rigs.lease_rig import book_of, ledger_of

KEY = ServerKey(ServerId("a"), 0x1234567890ABCDEF)
# Bytes of a trajectory that is remembered, at most.
MOST_BYTES = 4


def any_id(source: random.Random) -> TrajectoryId:
    """Draws from few ids, so that many come twice; most are first attempts, some are foreign."""
    group = source.choice(
        ["g000001", "g000256", "e1-000001", "e12-000001", "g1", "g0000001", "x"]
    )
    member = source.choice([0, 1, 15, 63, 64, 200])
    attempt = source.choice([0, 0, 0, 1, 2])
    epoch = source.choice(["1", "2", "ffffffffffffffff", "01", "A"])
    text = f"{group}.{member}.{attempt}.{epoch}"
    return TrajectoryId(
        source.choice([text] * 8 + [f"{group}.00.0.{epoch}", "", f" {text}"])
    )


def test_it_is_a_set_whatever_the_ids_are() -> None:
    source = random.Random(5)
    for _ in range(40):
        seen = SeenIds()
        plain = set()
        for _ in range(150):
            added = any_id(source)
            trajectory_id = any_id(source)
            assert seen.add(added) == (added not in plain)
            plain.add(added)
            assert (trajectory_id in seen) == (trajectory_id in plain), trajectory_id
        other = copy.deepcopy(seen)
        other.add(TrajectoryId("g000009.0.0.1"))
        assert TrajectoryId("g000009.0.0.1") not in seen
        assert all(trajectory_id in other for trajectory_id in plain)


def test_ids_that_nobody_made_take_little_room() -> None:
    tracemalloc.start()
    seen = SeenIds()
    for n in range(100):
        seen.add(TrajectoryId(f"g{10**11 + 1000 * n}.999999999.0.1"))
    assert tracemalloc.get_traced_memory()[0] < 100 * 10_000
    tracemalloc.stop()
    assert TrajectoryId(f"g{10**11}.999999999.0.1") in seen


def test_a_ledger_takes_few_bytes_a_trajectory_and_knows_each() -> None:
    ledger = ledger_of(ServerEpochs())
    num_groups = 1000
    size = 16
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
    other_ids = ("g000001", "g000003", "g2", "e1-000002", "")
    assert [steps.get(GroupId(text)) for text in other_ids] == [None] * 5


def test_the_steps_of_many_groups_take_little_memory() -> None:
    tracemalloc.start()
    steps = GroupSteps()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(50_000):
        steps.add(GroupId(f"g{number:06d}"), number // 64)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown / 50_000 < 8


def start(**changes):
    return {"kind": "start", "format": 1, "run_id": "r-1"} | changes


def step(number: int, incarnation: int, digest: str):
    version = [incarnation, number + 1]
    facts = {"lags": [], "several": 0}
    return {
        "kind": "step",
        "step": number,
        "version": version,
        "digest": digest,
    } | facts


def test_attempts_of_an_open_group_count_on():
    end = {
        "kind": "end",
        "end": "failed",
        "cause": "",
        "tokens": 1,
        "server": "s",
        "epoch": 7,
    }
    history = read_history(
        [
            start(),
            lease_record("g000000"),
            end | {"id": "g000000.1.0.7"},
            end | {"id": "g000000.1.2.7"},
            end | {"id": "g000000.1.1.7"},
        ]
    )
    (group,) = history.open_groups.values()
    assert group.attempts == {1: 2}


def closed(group: str, **changes):
    return {"kind": "closed", "group": group, "how": "filtered", "cause": ""} | changes


def test_filtered_groups_are_counted_since_the_last_batch_and_by_step():
    records = [start(), *(lease_record(f"g00000{i}", i) for i in range(5))]
    records += [closed("g000000", solved=True, reward=1.0), batch_record(0, "g000001")]
    # An earlier version wrote the records like this.
    records += [closed("g000002"), closed("g000003", solved=True, reward=1.0)]
    history = read_history(records)
    assert history.filtered_groups == {0: 1, 1: 2}
    assert history.filtered == [("e", 0.0, False), ("e", 1.0, True)]


def test_groups_that_ended_untrained_are_counted_since_the_last_batch() -> None:
    def read(*records: dict) -> RunHistory:
        return read_history([start(), *records])

    leases = [lease_record(f"g{n:06d}", n) for n in range(5)]
    ended = [
        {"kind": "closed", "group": "g000000", "how": "filtered", "cause": "equal"},
        {
            "kind": "set_aside",
            "group": "g000001",
            "task": 1,
            "cause": "broken",
            "blamed": False,
        },
        lease_record("g000005", 5, replaces="g000002", environment="f"),
    ]
    batch = batch_record(0, "g000003", owed={"e": 0.25, "f": -0.25})
    before = read(*leases, *ended)
    assert (before.ended_groups, before.owed) == ({"e": 3}, {})
    after = read(*leases, *ended, batch)
    assert (after.ended_groups, after.owed) == ({}, {"e": 0.25, "f": -0.25})
    aside = {"kind": "batch_set_aside", "step": 0, "batch_id": "b000000", "by": "user"}
    aside |= {
        "groups": [["g000003", "e", 3]],
        "put_back": [],
        "put_back_trajectories": 0,
    }
    aside |= {"put_back_tokens": [], "ids": [], "tokens": 4, "cause": "why"}
    assert read(*leases, *ended, batch, aside).ended_groups == {"e": 1}


def test_the_highest_reward_of_an_environment_outlives_the_controller():
    records = [start(), *(lease_record(f"g00000{i}", i) for i in range(3))]
    records += [
        closed("g000000", reward=3.0, seen=[0.0, 8.0]),
        closed("g000001", reward=3.0),
    ]
    records += [batch_record(0, "g000002", seen={"e": [2.0, 10.0]})]
    assert read_history(records).environments["e"].seen == (0.0, 10.0)


def test_a_lease_that_goes_on_elsewhere_is_the_same_group():
    history = read_history(
        [start(), lease_record("g000000"), lease_record("g000000", number=-1)]
    )
    assert len(history.open_groups) == 1
    assert history.environments["e"].next_number == 1


def test_the_newest_record_of_a_step_counts_and_its_timeline_is_the_runs():
    records = [start(), lease_record("g000000"), lease_record("g000001", 1)]
    records += [
        batch_record(0, "g000000"),
        step(0, 0, "a"),
        batch_record(1, "g000001"),
        step(1, 0, "b"),
    ]
    assert read_history(records).version == PolicyVersion(0, 2)
    history = read_history([*records, step(0, 1, "c")])
    assert history.version == PolicyVersion(1, 2)
    assert history.steps[0] == JournaledStep(PolicyVersion(1, 1), "c")
    assert history.ends[TrajectoryEnd.TRAINED] == 8


@pytest.mark.parametrize(
    ("records", "cause"),
    [
        ([lease_record("g000000")], "older version"),
        ([start(format=2)], "format 2"),
        (
            [start(), lease_record("g000000"), batch_record(1, "g000000")],
            "step 2 after that of 0",
        ),
        ([start(), batch_record(0, "g000000")], "g000000, which is not open"),
        (
            [
                start(),
                lease_record("g000000"),
                batch_record(0, "g000000"),
                batch_record(1, "g000000"),
            ],
            "g000000, which is not open",
        ),
        ([start(), step(0, 0, "a")], "step 1 without its batch"),
    ],
)
def test_records_that_cannot_be_of_one_run_are_refused(records, cause):
    with pytest.raises(ProtocolError, match=cause):
        read_history(records)


def test_records_are_written_as_they_are_read() -> None:
    evaluation = {
        "evaluations": {"held": {"reward_mean": 0.5}},
        "wall_s": 1.5,
        "replies_crc32": [7],
    }
    for record in RECORDS:
        full_record = record | (evaluation if record["kind"] == "evaluation" else {})
        assert json.loads(json.dumps(fields_of(parsed(full_record)))) == full_record
    assert {record["kind"] for record in RECORDS} >= {
        "lease",
        "end",
        "servers",
        "batch_set_aside",
    }


@pytest.mark.parametrize(
    ("record", "fact"),
    [
        ({"kind": "weather", "rain": True}, "a record 'weather'"),
        (
            {"kind": "servers", "generated": [], "judged": [["s", 7, 3]]},
            "the field 'judged' of a record 'servers'",
        ),
    ],
)
def test_a_fact_that_another_release_wrote_is_refused_by_its_name_and_version(
    record: dict, fact: str
) -> None:
    newer = start(packages={"slipstream-rl": "0.9.0"})
    with pytest.raises(ProtocolError) as caught:
        read_history([start(), newer, record])
    line = "line 3 of the journal, by slipstream-rl 0.9.0, is of another release: "
    assert str(caught.value).startswith(f"{line}{fact} is not known to slipstream-rl ")
    assert "go on with the release that wrote it" in str(caught.value)


@pytest.mark.parametrize("left_out", ["end", "tokens", "server", "epoch"])
def test_an_end_has_all_facts_of_its_trajectory(left_out: str) -> None:
    end = {
        "kind": "end",
        "id": "x",
        "end": "failed",
        "tokens": 1,
        "server": "s",
        "epoch": 7,
    }
    with pytest.raises(
        ProtocolError, match=f"no record 'end': .*required field `{left_out}`"
    ):
        read_history([start(), {name: end[name] for name in end if name != left_out}])


def test_the_same_digest_is_the_same_version():
    recorded = JournaledStep(PolicyVersion(1, 5), "a")
    assert version_of(5, "a", recorded, trainer=0, newest=1) == PolicyVersion(1, 5)
    assert version_of(5, "a", recorded, trainer=1, newest=3) == PolicyVersion(1, 5)


def test_another_digest_begins_a_timeline_that_no_version_had():
    recorded = JournaledStep(PolicyVersion(1, 5), "a")
    assert version_of(5, "b", recorded, trainer=1, newest=3) == PolicyVersion(4, 5)
    assert version_of(5, "b", recorded, trainer=0, newest=1) == PolicyVersion(2, 5)


def test_nothing_is_expected_of_a_timeline_that_is_newer_than_the_record():
    recorded = JournaledStep(PolicyVersion(0, 5), "a")
    assert version_of(5, "b", recorded, trainer=2, newest=2) == PolicyVersion(2, 5)
    assert version_of(5, "b", None, trainer=0, newest=2) == PolicyVersion(0, 5)


def test_servers_that_were_leased_anything_are_known_after_a_restart():
    evaluation = {
        "kind": "evaluation_lease",
        "group": "e1-000000",
        "server": "t",
        "epoch": 8,
    }
    history = read_history([start(), lease_record("g000000", 0), evaluation])
    assert all(history.servers.was_given(epoch) for epoch in (7, 8))
    assert ServerKey(ServerId("t"), 8) in history.servers
    assert ServerKey(ServerId("s"), 8) not in history.servers


def test_a_quarantined_delivery_without_a_name_is_read_back():
    end = {
        "kind": "end",
        "id": "what",
        "end": "quarantined",
        "tokens": 3,
        "server": "u",
    }
    history = read_history([start(), {**end, "epoch": 0}])
    assert history.ends[TrajectoryEnd.QUARANTINED] == 3
    assert "what" in history.ended


def test_what_was_made_up_for_a_group_does_not_count_as_its_attempt() -> None:
    history = RunHistory()
    lease = {
        "kind": "lease",
        "group": "g000000",
        "environment": "e",
        "number": 0,
        "task": 0,
    }
    history.add(parsed({**lease, "seed": 1, "deadline": 3, "server": "a", "epoch": 1}))
    history.add(parsed({**lease, "seed": 1, "deadline": 3, "server": "b", "epoch": 2}))
    end = {"kind": "end", "cause": "", "tokens": 0, "server": "a", "epoch": 1}
    history.add(parsed({**end, "id": "g000000.0.1.1", "end": "failed"}))
    history.add(parsed({**end, "id": "g000000.0.999998.1", "end": "quarantined"}))
    book = book_of()
    book.restore(history)
    (group,) = book.groups.values()
    assert group.next_attempt == 2
    assert [group.excess(epoch, 13) == "" for epoch in (1, 2, 3)] == [True, True, False]
    assert (
        group.excess(1, 14)
        == "attempt 14 of g000000, which was leased for attempts 0 to 13"
    )


def test_only_a_group_for_which_its_environment_is_to_blame_counts_as_failed() -> None:
    aside = {"kind": "set_aside", "task": 0, "cause": "x"}
    records = [start(), lease_record("g000000"), lease_record("g000001", 1)]
    records += [
        aside | {"group": "g000000", "blamed": False},
        aside | {"group": "g000001"},
    ]
    counts = read_history(records).environments["e"]
    assert (counts.leased, counts.accepted, counts.failed) == (0, 0, 1)


def test_an_environment_that_is_submitted_again_counts_nothing_of_the_batch_before() -> (
    None
):
    # Readers get the counts as unsigned numbers.
    records = records_up_to({"kind": "submitted", "environment": "e", "spec": "{}"})
    counts = read_history([*records, SET_ASIDE]).environments["e"]
    assert (counts.leased, counts.accepted, counts.failed) == (1, 0, 1)


def test_members_that_were_given_up_are_not_leased_again() -> None:
    history = RunHistory()
    history.add(parsed(lease_record("g000000")))
    history.add(kinds.GaveUp(group="g000000", members=[1], cause="x"))
    history.add(kinds.GaveUp(group="g000000", members=[3], cause="x"))
    # The trajectory's group may have ended meanwhile.
    history.add(kinds.GaveUp(group="g000007", members=[0], cause="x"))
    book = book_of(group_size=4)
    book.restore(history)
    (group,) = book.groups.values()
    assert (group.missing, group.num_missing) == ([0, 2], 2)


SET_ASIDE = {
    "kind": "batch_set_aside",
    "step": 0,
    "batch_id": "b000000",
    "by": "trainer",
    "cause": "the loss is nan",
    "groups": [["g000000", "e", 0]],
    "put_back": [["g000001", "e", 1, 3]],
    "ids": ["g000000.0.0.7"],
    "tokens": 4,
    "put_back_trajectories": 1,
    "put_back_tokens": [["s", 7, 5]],
}


def records_up_to(last: dict[str, object]) -> list[dict[str, object]]:
    """A journal of two leases and a batch of both groups, before its `last` record."""
    groups = ("g000000", "g000001")
    leases = [
        lease_record(group, number, seed=3) for number, group in enumerate(groups)
    ]
    batch = batch_record(0, *groups, trajectories=2, tokens=[["s", 7, 9]])
    return [{"kind": "start", "format": 1, "run_id": "r"}, *leases, batch, last]


def test_a_batch_that_was_set_aside_is_read_back() -> None:
    history = read_history(records_up_to(SET_ASIDE))
    assert list(history.open_groups) == ["g000001"]
    # A server that still delivers for an old lease is no stranger.
    assert history.open_groups[GroupId("g000001")].epochs == {7}
    assert history.batches == {}


def test_what_ended_before_a_restart_counts_once() -> None:
    end = {
        "kind": "end",
        "id": "g000001.0.0.7",
        "end": "failed",
        "cause": "",
        "tokens": 3,
    }
    end |= {"server": "s", "epoch": 7}
    history = read_history([*records_up_to(SET_ASIDE), end])
    ledger = ledger_of(ServerEpochs(), state=history)
    ledger.restore(history)
    now = ledger.snapshot()
    assert (now.generated, now.set_aside, now.failed, now.queued) == (7, 4, 3, 0)
    assert now.difference == 0
    # A server that did not hear that they were taken delivers them again.
    for text in ("g000000.0.0.7", "g000001.0.0.7"):
        assert not ledger.receive(ServerKey(ServerId("s"), 7), TrajectoryId(text), 4)
    counts = history.environments["e"]
    assert (counts.next_number, counts.leased, counts.accepted, counts.failed) == (
        2,
        1,
        0,
        1,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("groups", 5),
        ("groups", [["g000000"]]),
        ("put_back", [["g000001", "e", 1]]),
        ("put_back", {"g000001": 1}),
        ("ids", [7]),
        ("tokens", "many"),
        ("put_back_tokens", None),
        ("by", 1),
    ],
)
def test_a_damaged_record_of_a_batch_that_was_set_aside_is_refused(field, value):
    with pytest.raises(ProtocolError, match=f"line 5 of the journal .*{field}"):
        read_history(records_up_to({**SET_ASIDE, field: value}))


def test_a_group_is_solved_when_all_its_rewards_are_full() -> None:
    # Equal after a penalty: they were filtered, and one of them is not right.
    assert not is_solved([1.0, 0.5], lowest=0.5, highest=1.0)
    assert is_solved([1.0, 0.7 + 0.2 + 0.1], lowest=0.0, highest=1.0)


@pytest.mark.parametrize(
    ("rewards", "lowest", "highest", "solved"),
    [
        ([3.0, 3.0], 0.0, 7.0, False),
        ([10.0, 10.0], 0.0, 10.0, True),
        ([10.0, 9.0], 0.0, 10.0, False),
        # Without another reward nobody knows what 3 is.
        ([3.0, 3.0], 3.0, 3.0, False),
        # Some had a bonus.
        ([1.0, 1.0], 0.0, 1.1, False),
    ],
)
def test_rewards_above_1_are_full_if_they_are_the_highest(
    rewards, lowest, highest, solved
):
    assert is_solved(rewards, lowest=lowest, highest=highest) is solved
