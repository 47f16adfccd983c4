"""The groups of one step, of a batch that is set aside, and of one that is withdrawn."""

import asyncio
import dataclasses
import itertools
import json
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from slipstream.core import staleness
from slipstream.core.errors import ProtocolError
from slipstream.core.group_sizes import GroupSizes
from slipstream.core.types import (
    MEASURED,
    Branch,
    GroupId,
    PolicyVersion,
    ServerId,
    Status,
    Trajectory,
    VersionSpan,
)
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.leasing.shares import BatchChoice, Mixture
from slipstream.learner.controller.loop import BatchFormer
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory, read_history
from slipstream.learner.controller.records.journal import Journal, read_records
from slipstream.learner.controller.records.kinds import TrajectoryEnd, fields_of, parsed
from slipstream.learner.controller.records.recorded_steps import attempt_of, batch_name
from slipstream.learner.controller.records.state import FilteredGroup
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.formed_batch import (
    FormedBatch,
    SetAside,
    StepOrder,
    batch_statistics,
    chunks,
    environment_means,
    equal_rewards,
    from_contents,
)
from slipstream.learner.controller.trajectories.intake import (
    MOST_FILTERED_BATCHES,
    Intake,
)
from slipstream.protocol.codec import passes_digest, trajectory_to_pb
from slipstream.v1 import trainer_pb2, trajectory_pb2
from support.fakes.fake_controller import make_batch
from support.fakes.fake_trajectories import GOOD, plain_group
from support.fakes.journal_records import batch_record, lease_record
from support.fakes.small_configs import config_of
from support.references.documented_metrics import tables
from support.rigs.batch_messages import in_one_message
from support.rigs.lease_rig import book_of, books_of, take_batch
from support.rigs.publishing_scene import run_of
from support.rigs.waiting import LIMIT_S


@pytest.fixture
def batch() -> FormedBatch:
    batch = make_batch(0, num_groups=3, group_size=2, vocab_size=8, max_tokens=9)
    message = trainer_pb2.RecordedBatch(
        header=trainer_pb2.BatchHeader(step=0, batch_id="b0"),
        trajectories=[
            trajectory_to_pb(trajectory) for trajectory in batch.trajectories
        ],
    )
    return from_contents(message)


def test_a_group_without_some_of_its_members_is_told_as_it_is(
    batch: FormedBatch,
) -> None:
    del batch.groups[1].finished[0]
    batch.groups[1].failed.add(0)
    read = from_contents(batch.contents)
    assert (read.header.num_groups, read.header.num_trajectories) == (3, 5)
    assert read.header == batch.header
    assert all(group.is_complete and not group.missing for group in read.groups)
    assert in_one_message(read.contents) == in_one_message(batch.contents)


@pytest.mark.parametrize("messages_each", [0.5, 1, 2.5])
def test_chunks_are_within_their_bytes_and_never_empty(batch, messages_each):
    limit = int(messages_each * max(m.ByteSize() for m in batch.contents.trajectories))
    parts = [list(chunk.trajectories) for chunk in chunks(batch, chunk_bytes=limit)]
    assert [message for part in parts for message in part] == list(
        batch.contents.trajectories
    )
    assert all(part for part in parts)
    assert all(
        len(part) == 1 or sum(m.ByteSize() for m in part) <= limit for part in parts
    )


@pytest.mark.parametrize(
    ("adapter", "ids", "is_held"),
    [("a", "pq", True), ("b", "pq", False), ("a", "qp", False), ("a", "pqr", False)],
)
def test_the_trainer_gets_again_all_passes_but_exactly_those_whose_gradients_it_holds(
    adapter: str, ids: str, is_held: bool
) -> None:
    sequences = [trainer_pb2.PassSequence(token_ids=bytes(4))]
    passes = tuple(trainer_pb2.Pass(id=name, sequences=sequences) for name in "pq")
    given_step = trainer_pb2.GivenStep(adapter=trainer_pb2.Adapter(name="a"))
    batch = FormedBatch(0, "b0", (), StepOrder(given_step, passes))
    (chunk,) = chunks(batch, [passes_digest(adapter, ids)])
    assert [client_pass.id for client_pass in chunk.passes] == ["p", "q"]
    assert [not client_pass.sequences for client_pass in chunk.passes] == [is_held] * 2
    assert list(batch.contents.passes) == list(passes)


SERVER = ServerKey(ServerId("s"), 7)


def make_group(number: int) -> Group:
    """A whole group of two members, each with the tokens of a made-up trajectory."""
    trajectories = make_batch(
        0, num_groups=1, group_size=2, vocab_size=8, max_tokens=8
    ).trajectories
    group_id = GroupId(f"g{number:06d}")
    finished = {
        t.member: dataclasses.replace(t, group_id=group_id) for t in trajectories
    }
    return plain_group(
        group_id=group_id, task_index=number, seed=0, deadline_step=0, finished=finished
    )


BATCH = FormedBatch(0, "b000000", tuple(make_group(number) for number in range(8)))
TOKENS = sum(t.num_sampled_tokens for t in BATCH.groups[0].in_order())


def records(*more: dict) -> list[dict]:
    """A journal that ends with `BATCH`, and `more`."""
    start = {"kind": "start", "format": 1, "run_id": "r"}
    holder = {"server": "server", "epoch": 1}
    leases = [
        lease_record(group.group_id, number, seed=0, deadline=0, **holder)
        for number, group in enumerate(BATCH.groups)
    ]
    groups = [group.group_id for group in BATCH.groups]
    sizes = {
        "trajectories": len(BATCH.trajectories),
        "tokens": [["server", 1, 8 * TOKENS]],
    }
    batch = batch_record(0, *groups, **sizes)
    return [start, *leases, batch, *more]


def aside(*named: str, by: str = "trainer") -> dict:
    record = SetAside.of(BATCH, named, "why", by=by).record()
    return json.loads(json.dumps(fields_of(record)))


def test_a_batch_id_tells_how_many_of_its_step_were_set_aside() -> None:
    assert [batch_name(16, attempt) for attempt in (0, 1, 12)] == [
        "b000016",
        "b000016-1",
        "b000016-12",
    ]
    assert [
        attempt_of(name) for name in ("b000016", "b000016-1", "b000016-12", "b0")
    ] == [
        0,
        1,
        12,
        0,
    ]


def test_the_first_few_groups_are_told_with_their_tasks() -> None:
    text = SetAside.of(BATCH, [], "why", by="trainer").describe()
    message = ", ".join(f"g{n:06d} (environment e, task {n})" for n in range(5))
    assert text == (
        f"batch b000000 of step 1 is set aside: why; never trained: {message} and 3 more, "
        "in all 8 of e"
    )


def test_a_group_of_another_batch_is_refused() -> None:
    with pytest.raises(
        ProtocolError, match="b000000 of step 1 has no group g000099; it has g000000, "
    ):
        SetAside.of(BATCH, ["g000001", "g000099"], "why", by="user")


def test_history_closes_the_ledger_of_what_is_over_and_opens_what_waits() -> None:
    history = read_history(records(aside("g000003")))
    assert (history.next_step, history.batches, history.set_aside_in_a_row) == (
        0,
        {},
        1,
    )
    assert [batch.batch_id for batch in history.set_aside] == ["b000000"]
    assert history.ends[TrajectoryEnd.SET_ASIDE] == TOKENS
    assert history.servers.count(ServerKey(ServerId("server"), 1)).received == TOKENS
    assert set(history.put_back) == set(history.open_groups)
    assert set(history.put_back) == {g.group_id for g in BATCH.groups} - {"g000003"}
    assert {group.deadline_step for group in history.open_groups.values()} == {0}
    assert (history.environments["e"].accepted, history.environments["e"].failed) == (
        0,
        1,
    )
    ids = {t.trajectory_id for t in BATCH.groups[3].in_order()}
    assert all(trajectory_id in history.ended for trajectory_id in ids)
    assert history.trained_in.get(GroupId("g000003")) is None


async def test_a_step_that_is_made_again_does_not_begin_the_count_anew(
    tmp_path: Path,
) -> None:
    # Otherwise a trainer that goes back to its checkpoint after each fault would never reach the
    # limit.
    async with asyncio.TaskGroup() as tasks:
        with Journal(tmp_path) as journal:
            books = books_of(run_of(), journal=journal)
            step = {
                "kind": "step",
                "step": 0,
                "version": [0, 1],
                "digest": "ab",
                "several": 0,
            }
            faulty = [
                lease_record("g000008", 8),
                batch_record(1, "g000008"),
                aside()
                | {"step": 1, "batch_id": "b000001", "groups": [], "put_back": []},
            ]
            for record in records(step | {"lags": []}, *faulty):
                books.state.apply(parsed(record))
            former = BatchFormer(books, tasks)
            former.training = BATCH
            version = trajectory_pb2.PolicyVersion(step=1)
            report = trainer_pb2.StepReport(
                batch_id="b000000", version=version, weight_digest=b"\xab"
            )
            assert former.trained(report).again
            assert books.state.set_aside_in_a_row == 1


def step_record(step: int, incarnation: int, digest: str) -> dict:
    version = {"step": step, "version": [incarnation, step + 1], "digest": digest}
    return {"kind": "step", "several": 0, "lags": []} | version


@pytest.mark.parametrize(
    ("earlier", "version", "digest", "found", "journaled"),
    [
        ([step_record(0, 1, "ab")], (1, 1), "ab", (1, 1), []),
        ([step_record(0, 1, "ab")], (0, 0), "ef", (0, 0), []),
        # A trainer that another one had replaced, or whose checkpoint was whole late.
        ([step_record(0, 1, "ab")], (0, 1), "cd", (2, 1), [([2, 1], "cd")]),
        # The step before it was made again; these weights were not made from that.
        (
            [
                step_record(0, 0, "aa"),
                lease_record("g000008", 8),
                batch_record(1, "g000008"),
                step_record(1, 0, "bb"),
                step_record(0, 1, "ab"),
            ],
            (0, 2),
            "bb",
            (0, 2),
            [([0, 1], "aa")],
        ),
    ],
)
async def test_the_journal_gets_the_weights_that_a_trainer_brings_and_what_they_were_made_from(
    tmp_path: Path,
    earlier: list[dict],
    version: tuple[int, int],
    digest: str,
    found: tuple[int, int],
    journaled: list[tuple[list[int], str]],
) -> None:
    async with asyncio.TaskGroup() as tasks:
        with Journal(tmp_path) as journal:
            lags = sorted(BATCH.token_lags.items())
            rows = [
                r | {"lags": lags} if r["kind"] == "step" else r
                for r in records(*earlier)
            ]
            for record in rows:
                journal.append(parsed(record))
            books = books_of(run_of(), journal=journal, state=read_history(rows))
            former = BatchFormer(books, tasks)
            assert former.identify(PolicyVersion(*version), digest) == PolicyVersion(
                *found
            )
            await former.adopt(PolicyVersion(*version), digest)
            journal.sync()
        got = list(read_records(tmp_path))[len(rows) :]
    assert [(record["version"], record["digest"]) for record in got] == journaled
    assert all(record["lags"] == [list(lag) for lag in lags] for record in got)


async def test_steps_that_a_client_orders_are_set_aside_again_and_again(
    tmp_path: Path,
) -> None:
    adam = trainer_pb2.AdamNumbers(learning_rate=1.0)
    order = StepOrder(trainer_pb2.GivenStep(id="s:1:optim_step", adam=adam))
    async with asyncio.TaskGroup() as tasks:
        with Journal(tmp_path) as journal:
            former = BatchFormer(books_of(run_of(), journal=journal), tasks)
            for attempt in range(3):
                batch = await former.form(order)
                fault = trainer_pb2.DataFault(step=0, batch_id=batch.batch_id)
                set_aside = former.set_aside(fault, "the loss is nan", most_in_a_row=1)
                assert set_aside is not None
                assert former._state.set_aside_in_a_row == attempt + 1


def test_the_users_word_begins_the_count_anew() -> None:
    assert read_history(records(aside(by="user"))).set_aside_in_a_row == 0


def test_history_refuses_to_set_a_trained_batch_aside() -> None:
    step = {
        "kind": "step",
        "step": 0,
        "version": [0, 1],
        "digest": "d",
        "lags": [],
        "several": 0,
    }
    with pytest.raises(ProtocolError, match="does not wait for the trainer"):
        read_history(records(step, aside()))
    with pytest.raises(ProtocolError, match="does not wait for the trainer"):
        read_history(records(aside(), aside()))
    assert RunHistory().set_aside == []


@pytest.mark.parametrize(
    ("per_step", "max_staleness"), itertools.product((1, 2, 3), (0, 1, 2))
)
def test_groups_that_are_put_back_keep_the_invariant(
    per_step: int, max_staleness: int
) -> None:
    for num_back in range(per_step + 1):
        book = book_of(groups_per_step=per_step, max_staleness=max_staleness)
        lease_all(book, served_step=0)
        for group in book.training_groups():
            group.finished = dict(make_group(0).finished)
        batch = take_batch(book)
        # Other groups are leased while the trainer has the batch.
        lease_all(book, served_step=0)
        book.put_back(0, batch[:num_back], {})
        deadlines = Counter(group.deadline_step for group in book.training_groups())
        assert staleness.holds(deadlines, book.step, per_step)
        # The lost groups can be leased again.
        assert lease_all(book, served_step=0) >= per_step - num_back
        for group in book.training_groups():
            group.finished = dict(make_group(0).finished)
        again = take_batch(book)
        assert again is not None
        assert set(batch[:num_back]) <= set(again)


def test_a_group_that_a_file_brings_back_knows_its_leases_and_its_members() -> None:
    # An earlier controller formed the batch; what it leased may still arrive.
    message = in_one_message(BATCH.contents)
    del message.trajectories[4]
    first, *later = records()
    again = lease_record("g000002", 2, server="other", epoch=9, seed=0, deadline=0)
    history = read_history([first, *later[:-1], again, later[-1], aside("g000003")])
    book = book_of(groups_per_step=8)
    book.step = 1
    book.put_back(0, [from_contents(message).groups[2]], history.open_groups)
    group = book.groups[GroupId("g000002")]
    assert (group.size, set(group.finished), group.failed) == (2, {1}, {0})
    assert group.is_complete
    assert [group.excess(epoch, 13) == "" for epoch in (1, 9, 3)] == [True, True, False]


async def test_ends_that_a_crash_cut_off_are_made_up_for(tmp_path: Path) -> None:
    closed = {"kind": "closed", "group": "g000001", "how": "withdrawn", "cause": "why"}
    cut_off, ended = (t.trajectory_id for t in BATCH.groups[1].in_order())
    end = {"kind": "end", "id": ended, "end": "cancelled", "tokens": 1, "cause": "why"}
    run = run_of(algorithm={"group_size": 2, "groups_per_step": 8})
    async with asyncio.TaskGroup() as tasks:
        with Journal(tmp_path) as journal:
            written = {"crc32": journal.write_batch(BATCH.contents).crc32}
            holder = {"server": "server", "epoch": 1}
            more = [aside("g000003"), closed, end | holder]
            earlier = [
                r | written if r["kind"] == "batch" else r for r in records(*more)
            ]
            history = read_history(earlier)
            books = books_of(run, journal=journal)
            books.leases.restore(history)
            BatchFormer(books, tasks).restore(history)
            journal.sync()
        (made_up,) = read_records(tmp_path)
    assert (made_up["kind"], made_up["id"], made_up["end"]) == (
        "end",
        cut_off,
        "cancelled",
    )
    assert len(books.leases.groups) == 6
    assert all(group.is_complete for group in books.leases.groups.values())
    # After the next batch nobody reads the file again.
    groups = [*history.open_groups]
    later = read_history(
        [*earlier, made_up, batch_record(0, *groups, batch_id="b000000-1")]
    )
    assert later.put_back == {}


def lease_all(book: LeaseBook, *, served_step: int) -> int:
    """Leases as much as may be; the number of groups."""
    count = 0
    while book.may_lease(served_step):
        book.lease("e", 0, 0, SERVER, served_step)
        count += 1
    return count


def saved(version: int) -> trainer_pb2.CheckpointReport:
    return trainer_pb2.CheckpointReport(
        version=trajectory_pb2.PolicyVersion(step=version)
    )


class SlowJournal(Journal):
    """A journal whose disk holds a batch back until `disk` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.disk = threading.Event()

    def write_batch(self, batch: trainer_pb2.RecordedBatch) -> kinds.StepBatch:
        assert self.disk.wait(LIMIT_S)
        return super().write_batch(batch)


class EmptyBatches(LeaseBook):
    """A lease book whose every batch is complete, with no group."""

    def choose_batch(self, mixture: Mixture) -> BatchChoice[Group]:
        return BatchChoice([], {})


async def test_a_batch_that_is_being_written_is_not_missing(tmp_path: Path) -> None:
    run = run_of()
    book = EmptyBatches(
        groups_per_step=1,
        group_sizes=GroupSizes(1),
        max_staleness=1,
        num_steps=9,
        attempts_per_lease=1,
    )
    async with asyncio.TaskGroup() as tasks:
        with SlowJournal(tmp_path) as journal:
            books = books_of(run, journal=journal, leases=book)
            former = BatchFormer(books, tasks)
            task = asyncio.create_task(former.form())
            await asyncio.sleep(0)
            # A trainer that starts again comes while the batch of the one before is written.
            task.cancel()
            assert book.step == 1
            assert former.first_missing(0) is None
            batch_task = asyncio.create_task(former.recorded(0))
            await asyncio.sleep(0.05)
            assert not batch_task.done()
            journal.disk.set()
            assert (await batch_task).step == 0
            journal.path(0).unlink()
            assert former.first_missing(0) == journal.path(0)


def test_what_a_group_holds_ends_when_its_environment_does_not_come_again(
    tmp_path: Path,
) -> None:
    # A batch that was set aside has put a trajectory back into its group before.
    run = run_of(algorithm={"group_size": 2, "groups_per_step": 1, "max_staleness": 1})
    with Journal(tmp_path) as journal:
        books = books_of(run, journal=journal)
        group = books.leases.lease("served", 0, 0, ServerKey("s", 1), 0)
        trajectory = dataclasses.replace(
            GOOD,
            group_id=group.group_id,
            member=0,
            environment="served",
            task_index=0,
            seed=0,
        )
        books.leases.add(trajectory)
        intake = Intake(run, books)
        intake.withdraw([group], "environment served is not in the run")
        assert books.leases.groups == {}
        assert books.ledger.snapshot().cancelled == trajectory.num_sampled_tokens
    ends = [record for record in read_records(tmp_path) if record["kind"] == "end"]
    assert [end["id"] for end in ends] == [trajectory.trajectory_id]


@pytest.mark.parametrize(
    ("rewards", "solved"),
    [
        ({"a": [1.0] * MOST_FILTERED_BATCHES}, f"a: {MOST_FILTERED_BATCHES} of"),
        (
            {"b": [1.0] * 10, "a": [1.0] * 10},
            "a: 10 of 10 solved, mean reward 1; b: 10 of 10",
        ),
        # A single group that is not solved is no success.
        ({"b": [1.0] * 30, "a": [0.5, 1.0]}, ""),
        ({"a": [0.0] * MOST_FILTERED_BATCHES}, ""),
    ],
)
def test_a_task_is_solved_when_all_groups_that_teach_nothing_have_full_rewards(
    rewards, solved
):
    run = run_of(algorithm={"group_size": 2, "groups_per_step": 1, "max_staleness": 1})
    books = books_of(run)
    for name, rewards_of_one in rewards.items():
        books.state.filtered += [
            FilteredGroup(name, reward, reward == 1.0) for reward in rewards_of_one
        ]
    Intake(run, books).judge_filtered()
    progress = run.progress
    assert progress.has_failed is not bool(solved)
    assert progress.cause.startswith("the task is solved") is bool(solved)
    message = "(a: 1 of 2 solved, mean reward 0.75; b: 30 of 30 solved, mean reward 1)"
    assert (
        solved or (message if "b" in rewards else "(a: 0 of 20 solved")
    ) in progress.cause


def test_groups_that_are_left_out_while_a_batch_waits_or_is_written_do_not_end_the_run() -> (
    None
):
    run = run_of(algorithm={"group_size": 2, "groups_per_step": 1, "max_staleness": 1})
    books = books_of(run)
    intake = Intake(run, books)
    for _ in range(MOST_FILTERED_BATCHES):
        books.state.filtered.append(FilteredGroup("e", 0.0, solved=False))
    # The batch of the first step waits for a slow trainer.
    waiting = books.leases.lease("e", 0, 0, SERVER, 0)
    waiting.finished = dict(make_group(0).finished)
    intake.judge_filtered()
    assert not run.progress.has_failed
    # The batch has its groups and no record yet.
    assert take_batch(books.leases) == [waiting]
    intake.judge_filtered()
    assert not run.progress.has_failed
    books.state.next_step = 1
    intake.judge_filtered()
    assert run.progress.has_failed


def trajectory(reward: float, *run_lengths: int, **changes: object) -> Trajectory:
    sampled = sum(run_lengths[1::2])
    parts: dict[str, object] = {
        "token_ids": np.zeros(sum(run_lengths), np.uint32),
        "run_lengths": run_lengths,
        "behavior_logprobs": np.zeros(sampled, np.float32),
        "version_spans": (VersionSpan(sampled, PolicyVersion(0, 0)),),
        "reward": reward,
        "num_turns": len(run_lengths) // 2,
    }
    return dataclasses.replace(GOOD, **(parts | changes))


def batch_of(step: int, *trajectories: Trajectory) -> FormedBatch:
    members = [dataclasses.replace(t, member=n) for n, t in enumerate(trajectories)]
    message = trainer_pb2.RecordedBatch(
        header=trainer_pb2.BatchHeader(step=step, batch_id="b"),
        trajectories=[trajectory_to_pb(member) for member in members],
    )
    return from_contents(message)


def test_rewards_lags_lengths_turns_and_times_of_a_batch():
    old = PolicyVersion(0, 1)
    new = PolicyVersion(0, 3)
    spans = (VersionSpan(6, old), VersionSpan(3, new))
    batch = batch_of(
        3,
        trajectory(
            1.0, 3, 5, 2, 4, generation_s=3.0, environment_s=0.5, version_spans=spans
        ),
        trajectory(
            -2.0,
            7,
            1,
            status=Status.TRUNCATED,
            generation_s=1.0,
            version_spans=(VersionSpan(1, new),),
        ),
    )
    assert batch_statistics(batch) == {
        "reward_mean": -0.5,
        "reward_std": 1.5,
        "lag_mean": 1.2,
        "lag_max": 2.0,
        "trajectories_with_several_versions": 1.0,
        "num_tokens": 22.0,
        "reply_tokens_mean": 10 / 3,
        "reward_min": -2.0,
        "reward_max": 1.0,
        "prompt_tokens_mean": 5.0,
        "reply_tokens_max": 5.0,
        "episode_tokens_mean": 11.0,
        "episode_tokens_max": 14.0,
        "turns_mean": 1.5,
        "branches_mean": 1.0,
        "truncated_fraction": 0.5,
        "generation_s_mean": 2.0,
        "environment_s_mean": 0.25,
    }


def test_every_statistic_of_a_batch_has_a_row_of_the_page() -> None:
    documented = set(itertools.chain.from_iterable(tables("A step in metrics.jsonl")))
    statistics = batch_statistics(batch_of(0, trajectory(1.0, 1, 2)))
    assert statistics.keys() <= documented


def test_branches_are_counted_and_an_episode_without_any_is_one():
    tree = trajectory(0.0, 3, 5, 2, 4, 9, 1, branches=(Branch(4), Branch(2)))
    statistics = batch_statistics(batch_of(0, tree, trajectory(1.0, 1, 2)))
    assert statistics["branches_mean"] == 1.5
    assert (statistics["turns_mean"], statistics["episode_tokens_max"]) == (2.0, 24.0)


def test_each_environment_has_its_own_means():
    batch = [
        trajectory(1.0, 1, 1, metrics={"right": 1.0}),
        trajectory(0.0, 1, 1, metrics={"right": 0.0}),
        trajectory(5.0, 1, 1, environment="f"),
    ]
    assert environment_means(batch) == {
        "e/reward": 0.5,
        "e/right": 0.5,
        "f/reward": 5.0,
    }


def test_rewards_of_the_first_turns_are_means_over_the_episodes_that_have_them():
    earned = np.array([0, 1, 0.5, -2], np.float32)
    batch = [
        trajectory(-0.5, 1, 2, 1, 1, 1, 1, token_rewards=earned),
        trajectory(3.0, 1, 2, 1, 1),
        trajectory(1.0, 1, 2),
        # Branches that share a reward have none of their own.
        trajectory(0.5, 1, 1, 1, 1, branches=(Branch(2), Branch(2))),
        trajectory(1.0, 1, 2, environment="f"),
        trajectory(1.0, *[1, 1] * 20, environment="g"),
    ]
    means = environment_means(batch)
    names = {name: mean for name, mean in means.items() if "turn_rewards" in name}
    assert {n: m for n, m in names.items() if n.startswith("e/")} == {
        "e/turn_rewards/1": 2 / 3,
        "e/turn_rewards/2": 1.75,
        "e/turn_rewards/3": -2.0,
    }
    assert [n for n in names if n[0] != "e"] == [
        f"g/turn_rewards/{n}" for n in range(1, 9)
    ]


def test_the_rewards_of_named_branches_are_means_over_the_episodes_that_have_them():
    player = Branch(2, name="player", reward=1.0)
    judge = Branch(2, name="judge", reward=0.5)
    batch = [
        trajectory(0.0, 1, 1, 1, 1, 1, 1, branches=(player, judge, player)),
        trajectory(
            1.0, 1, 1, 1, 1, branches=(Branch(2, name="player", reward=0.0), Branch(2))
        ),
    ]
    assert environment_means(batch) == {
        "e/branch_rewards/player": 0.5,
        "e/branch_rewards/judge": 0.5,
        "e/reward": 0.5,
    }
    many = tuple(Branch(2, name=f"b{n:02}", reward=1.0) for n in range(20))
    names = environment_means([trajectory(0.0, *[1, 1] * 20, branches=many)])
    assert set(names) == {"e/reward", *(f"e/branch_rewards/b{n:02}" for n in range(16))}


def test_no_metric_of_an_environment_has_a_name_of_the_table(tmp_path):
    earned = np.array([0, 1], np.float32)
    branches = (Branch(2, name="a", reward=1.0), Branch(2))
    batch = [
        trajectory(1.0, 1, 1, 1, 1, token_rewards=earned),
        trajectory(
            1.0, 1, 1, 1, 1, branches=branches, metrics={"dropped_metrics": 1.0}
        ),
    ]
    table = environment_means(batch) | equal_rewards([batch], config_of(tmp_path))
    names = [name.partition("/")[2] for name in table if "/" in name]
    assert len(names) == 6
    assert [name for name in names if MEASURED.fullmatch(name) is None] == []


def test_what_is_counted_is_0_in_the_episodes_that_do_not_name_it():
    batch = [
        trajectory(1.0, 1, 1, metrics={"right": 1.0}),
        trajectory(0.0, 1, 1, metrics={"ignored/temperature": 4.0}),
    ]
    means = {"ignored/temperature": 2.0, "right": 1.0}
    assert environment_means(batch) == {
        f"e/{name}": mean for name, mean in means.items()
    } | {"e/reward": 0.5}


def test_groups_with_equal_rewards_are_counted_for_each_environment(tmp_path: Path):
    groups = [
        [trajectory(1.0, 1, 1), trajectory(0.0, 1, 1)],
        [trajectory(1.0, 1, 1), trajectory(1.0, 1, 1)],
        [
            trajectory(0.0, 1, 1, environment="f"),
            trajectory(0.0, 1, 1, environment="f"),
        ],
    ]
    assert equal_rewards(groups, config_of(tmp_path)) == {
        "equal_rewards_fraction": pytest.approx(2 / 3),
        "e/equal_rewards_fraction": 0.5,
        "f/equal_rewards_fraction": 1.0,
    }
