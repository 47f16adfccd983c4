"""Calls to environments that clients serve: no client waits for another that does not read."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from slipstream.client.status import environment_from_pb
from slipstream.core.group_sizes import GroupSizes
from slipstream.core.types import ServerId
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.servers import session
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.tasks import MAX_KINDS, EnvironmentBook, Relay
from slipstream.v1 import environment_pb2, fleet_pb2, trajectory_pb2
from slipstream.v1 import environment_pb2 as pb
from support.fakes.slow_disk import several_turns
from support.rigs.waiting import LIMIT_S, until

KEY = ServerKey(ServerId("a"), 1)


def make_book(*weights: float, num_tasks: int = 5) -> EnvironmentBook:
    book = EnvironmentBook(RunState(), seed=1)
    for index, weight in enumerate(weights):
        add(book, f"e{index}", weight, num_tasks)
    return book


def add(book, name, weight=1.0, num_tasks=5):
    purpose = trajectory_pb2.EPISODE_PURPOSE_TRAINING
    entry = book.add(
        environment_pb2.EnvironmentSpec(name=name, weight=weight, purpose=purpose)
    )
    entry.loaded(KEY, num_tasks)
    return entry


def accept(book, count):
    dealt = Counter()
    for _ in range(count):
        entry = book.next_for(KEY, {}, GroupSizes(4))
        entry.counts.accepted += 1
        dealt[entry.spec.name] += 1
    return dealt


def test_weights_govern_accepted_groups():
    assert accept(make_book(3.0, 1.0), 40) == {"e0": 30, "e1": 10}


@pytest.mark.parametrize(
    ("one_in", "trained", "leased"),
    [(1, 20, 20), (2, 20, 40), (4, 13, 53), (1000, 0, 53)],
)
@pytest.mark.parametrize("how", ["filtered", "failed"])
def test_shares_are_of_trained_groups_within_twice_the_leases(
    how, one_in, trained, leased
):
    book = make_book(1.0, 1.0)
    counts = Counter()
    while counts.total() < 40 if one_in <= 2 else counts["e1"] < 27:
        entry = book.next_for(KEY, {}, GroupSizes(4))
        name = entry.spec.name
        number = entry.counts.accepted + entry.counts.failed + 1
        if name == "e1" or number % one_in == 0:
            entry.counts.accepted += 1
            counts[name] += 1
        elif how == "filtered":
            entry.counts.accepted += 1
            entry.counts.filtered += 1
        else:
            entry.counts.failed += 1
    entry = book.entries["e0"]
    ended = entry.counts.accepted + entry.counts.failed
    assert abs(counts["e0"] - trained) <= 1
    assert abs(ended - leased) <= 1


def test_a_latecomer_gets_its_share_from_now_on():
    book = make_book(1.0)
    accept(book, 100)
    late = add(book, "late")
    late.counts.head_start = book.head_start(late)
    # An environment that comes again is level with the others already.
    assert book.head_start(late) == late.counts.head_start == 100.0
    assert accept(book, 10) == {"e0": 5, "late": 5}


def start_with_two() -> EnvironmentBook:
    """A run's two environments, of which the second one is not loaded anywhere."""
    book = EnvironmentBook(RunState(), seed=1)
    for name in ("quick", "slow"):
        purpose = trajectory_pb2.EPISODE_PURPOSE_TRAINING
        spec = environment_pb2.EnvironmentSpec(name=name, weight=1.0, purpose=purpose)
        book.add(spec, starts_run=True)
    book.entries["quick"].loaded(KEY, 5)
    return book


def test_at_the_start_the_first_to_load_leaves_the_others_their_part():
    book = start_with_two()
    assert accept(book, 1) == {"quick": 1}
    assert book.next_for(KEY, {}, GroupSizes(4)) is None
    book.entries["slow"].loaded(KEY, 5)
    assert accept(book, 15) == {"quick": 7, "slow": 8}


def test_nothing_waits_for_an_environment_that_the_server_could_not_load():
    book = start_with_two()
    book.entries["slow"].load_failed(KEY, "no such module")
    assert accept(book, 4) == {"quick": 4}
    elsewhere = ServerKey(ServerId("b"), 1)
    book.entries["quick"].loaded(elsewhere, 5)
    assert book.next_for(elsewhere, {}, GroupSizes(4)) is None


def test_nothing_waits_for_an_environment_that_came_to_a_running_mixture():
    book = make_book(1.0)
    purpose = trajectory_pb2.EPISODE_PURPOSE_TRAINING
    book.add(environment_pb2.EnvironmentSpec(name="late", weight=1.0, purpose=purpose))
    assert accept(book, 4) == {"e0": 4}


def tasks(book, number):
    """The next tasks of the first environment, each leased, and their seeds."""
    entry = book.entries["e0"]
    found = []
    for _ in range(number):
        found.append(book.next_task(entry))
        entry.counts.next_number += 1
    return found


def test_every_task_comes_once_before_any_comes_again():
    book = make_book(1.0, num_tasks=7)
    rounds = [[task for task, _ in tasks(book, 7)] for _ in range(3)]
    assert all(sorted(round_tasks) == list(range(7)) for round_tasks in rounds)
    assert rounds[0] != rounds[1]


def test_the_order_of_tasks_and_their_seeds_follow_from_the_seed():
    first = make_book(1.0)
    second = make_book(1.0)
    assert tasks(first, 9) == tasks(second, 9)


def test_an_environment_without_end_goes_on_counting():
    book = make_book(1.0, num_tasks=0)
    assert [task for task, _ in tasks(book, 4)] == [0, 1, 2, 3]


def fail(book, number, *, oldest_open=math.inf):
    return book.entries["e0"].group_failed(
        number, "broken", oldest_open=oldest_open, most=2
    )


def test_an_environment_whose_newest_groups_all_failed_is_to_be_suspended():
    book = make_book(1.0, 1.0)
    assert not fail(book, 0)
    assert fail(book, 1)
    book.entries["e0"].state = pb.ENVIRONMENT_STATE_SUSPENDED
    assert accept(book, 4) == {"e1": 4}
    assert book.entries["e0"].cause == "broken"


def test_a_complete_group_clears_the_count_of_failures_long_before_its_batch():
    book = make_book(1.0)
    fail(book, 0)
    book.entries["e0"].group_complete()
    assert not fail(book, 2)


def test_failures_do_not_count_before_older_groups_have_ended():
    # A group that fails at once ends before groups that were leased earlier and may be fine.
    book = make_book(1.0)
    assert not fail(book, 1, oldest_open=0)
    assert not fail(book, 2, oldest_open=0)
    assert not fail(book, 5, oldest_open=2)
    assert fail(book, 0, oldest_open=3)


def test_a_client_is_leased_no_more_than_it_has_room_for():
    book = make_book(1.0)
    book.entries["e0"].client_episodes = 6
    assert book.next_for(KEY, {"e0": 2}, GroupSizes(4)) is not None
    assert book.next_for(KEY, {"e0": 3}, GroupSizes(4)) is None


def test_nothing_is_leased_on_a_server_that_has_not_loaded_it():
    book = make_book(1.0)
    assert book.next_for(ServerKey(ServerId("b"), 1), {}, GroupSizes(4)) is None
    book.server_lost(KEY)
    assert book.next_for(KEY, {}, GroupSizes(4)) is None


def test_each_cause_of_a_failure_or_an_end_is_told_once_and_only_the_first_few():
    (entry,) = make_book(1.0).training()
    for kind in ("failure", "worker"):
        causes = ["a", "a", "b", "a", "c", "d", "b", "d"]
        assert [cause for cause in causes if entry.is_news(kind, cause)] == [
            "a",
            "b",
            "c",
        ]


def test_a_run_with_ever_new_causes_remembers_the_newest_kinds() -> None:
    entry = add(make_book(), "e")
    kinds_told = [
        f"set aside: request {number} failed" for number in range(MAX_KINDS + 5)
    ]
    assert all(entry.is_news(kind, "17") for kind in kinds_told)
    assert len(entry.told) == MAX_KINDS
    assert not entry.is_news(kinds_told[-1], "17")


def test_an_evaluation_tells_its_newest_round_only():
    book = make_book(1.0)
    spec = environment_pb2.EnvironmentSpec(
        name="held", weight=1.0, purpose=trajectory_pb2.EPISODE_PURPOSE_EVALUATION
    )
    heldout = book.add(spec)
    assert not heldout.describe().HasField("newest_round")
    # The second is in the configuration no more.
    first = {
        "held": {"reward_mean": 0.25, "pass_at_1": 0.5},
        "gone": {"reward_mean": 1.0},
    }
    for version, numbers in ((0, first), (50, {"held": {"reward_mean": 0.75}})):
        record = kinds.Evaluation(
            version=version, episodes=1, failed=0, evaluations=numbers
        )
        book._state.apply(record)
    newest = environment_from_pb(heldout.describe()).newest_round
    assert (newest.step, dict(newest.numbers)) == (50, {"reward_mean": 0.75})
    assert not book.entries["e0"].describe().HasField("newest_round")


class Stream:
    """One direction of a stream, written by the test."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue = asyncio.Queue()

    def say(self, message: object) -> None:
        self._messages.put_nowait(message)

    async def __aiter__(self) -> AsyncIterator:
        while True:
            yield await self._messages.get()


class Clients:
    """A relay with clients, each known by the environment that it serves."""

    def __init__(self) -> None:
        self.book = make_book()
        self.relay = Relay(self.book.entries)
        self.said: dict[str, Stream] = {}

    async def come(self, name: str) -> AsyncIterator[pb.WorkerCommand]:
        """The commands for a client, which reads when they are asked for."""
        stream = self.said[name] = Stream()
        entry = add(self.book, name)
        commands = self.relay.serve_episodes(entry, aiter(stream))
        first = asyncio.ensure_future(anext(commands))
        await until(lambda: entry.client is not None)
        self.first = first
        return commands


def call(name: str, number: int) -> fleet_pb2.EnvironmentCall:
    command = pb.WorkerCommand(call_id=number, ping=pb.PingCommand())
    return fleet_pb2.EnvironmentCall(environment=name, command=command)


async def test_a_client_that_does_not_read_holds_up_no_other(monkeypatch) -> None:
    monkeypatch.setattr(session, "MAX_MESSAGES", 3)
    clients = Clients()
    calls = Stream()
    await clients.come("frozen")
    frozen = clients.first
    await clients.come("alive")
    answers = clients.relay.call_environments(aiter(calls))
    calls.say(call("frozen", 1))
    answer_comes = asyncio.ensure_future(anext(answers))
    await asyncio.wait_for(frozen, LIMIT_S)
    # The relay reads no more: three messages wait, the rest finds no room.
    for number in range(2, 7):
        calls.say(call("frozen", number))
    calls.say(call("alive", 7))
    async with asyncio.timeout(LIMIT_S):
        refused = [await answer_comes, await anext(answers)]
        command = await clients.first
    assert [answer.message.call_id for answer in refused] == [5, 6]
    assert {answer.message.failure.message for answer in refused} == {
        "the client that serves frozen does not read"
    }
    clients.said["alive"].say(pb.WorkerMessage(call_id=command.call_id, pong=pb.Pong()))
    answer = await asyncio.wait_for(anext(answers), LIMIT_S)
    assert answer.message.call_id == 7
    assert answer.message.WhichOneof("message") == "pong"


async def test_a_client_cannot_answer_what_another_was_asked() -> None:
    clients = Clients()
    calls = Stream()
    await clients.come("asked")
    asked = clients.first
    await clients.come("other")
    answers = clients.relay.call_environments(aiter(calls))
    calls.say(call("asked", 5))
    answer_comes = asyncio.ensure_future(anext(answers))
    async with asyncio.timeout(LIMIT_S):
        number = (await asked).call_id
        for name, reward in (("other", 1.0), ("asked", 0.5)):
            verdict = pb.Verdict(reward=reward)
            clients.said[name].say(pb.WorkerMessage(call_id=number, verdict=verdict))
            await several_turns()
        answer = await answer_comes
    assert (answer.message.call_id, answer.message.verdict.reward) == (5, 0.5)


async def test_a_client_that_leaves_is_reported_though_a_server_does_not_read(
    monkeypatch,
) -> None:
    monkeypatch.setattr(session, "MAX_MESSAGES", 2)
    clients = Clients()
    calls = Stream()
    commands = await clients.come("leaving")
    answers = clients.relay.call_environments(aiter(calls))
    waiting = asyncio.ensure_future(anext(answers))
    async with asyncio.timeout(LIMIT_S):
        calls.say(call("leaving", 1))
        await clients.first
        for number in (2, 3):
            calls.say(call("leaving", number))
            await anext(commands)
        # Three open calls fail, and there is room for two answers.
        await commands.aclose()  # type: ignore[attr-defined]
        first = await waiting
        rest = [answer async for answer in answers]
    assert clients.book.entries["leaving"].client is None
    assert first.message.failure.message == "the client that served leaving left"
    assert len(rest) == 1


async def test_an_agent_is_followed_by_one_call_and_its_last_parts_leave_none_open() -> (
    None
):
    clients = Clients()
    calls = Stream()
    commands = await clients.come("agent")
    answers = clients.relay.call_environments(aiter(calls))
    for number, command in enumerate(
        (
            pb.WorkerCommand(follow_agent=pb.FollowAgentCommand(episode_key="e")),
            pb.WorkerCommand(reply_part=pb.ReplyPart(episode_key="e", is_last=True)),
        ),
        start=4,
    ):
        command.call_id = number
        calls.say(fleet_pb2.EnvironmentCall(environment="agent", command=command))
    comes = asyncio.ensure_future(anext(answers))
    async with asyncio.timeout(LIMIT_S):
        followed = await clients.first
        assert (await anext(commands)).reply_part.is_last
    assert len(clients.relay._calls) == 1
    for answer in (
        pb.WorkerMessage(agent_call=pb.AgentCall(call=1)),
        pb.WorkerMessage(agent_call=pb.AgentCall(call=2)),
        pb.WorkerMessage(agent_result=pb.AgentResult(reward=1.0)),
    ):
        answer.call_id = followed.call_id
        clients.said["agent"].say(answer)
    async with asyncio.timeout(LIMIT_S):
        came = [
            (await comes).message,
            *[(await anext(answers)).message for _ in range(2)],
        ]
    assert [message.call_id for message in came] == [4, 4, 4]
    assert [message.agent_call.call for message in came] == [1, 2, 0]
    assert came[-1].agent_result.reward == 1.0
    assert not clients.relay._calls


async def test_clients_close_what_a_lost_server_has_left_open() -> None:
    clients = Clients()
    calls = Stream()
    commands = await clients.come("served")
    answers = clients.relay.call_environments(aiter(calls))
    waits = asyncio.ensure_future(anext(answers))
    for number, command in enumerate(
        (
            pb.WorkerCommand(reset=pb.ResetCommand(episode_key="over")),
            pb.WorkerCommand(reset=pb.ResetCommand(episode_key="open")),
            pb.WorkerCommand(close=pb.CloseCommand(episode_key="over")),
            pb.WorkerCommand(follow_agent=pb.FollowAgentCommand(episode_key="open")),
        ),
        start=1,
    ):
        command.call_id = number
        calls.say(fleet_pb2.EnvironmentCall(environment="served", command=command))
    async with asyncio.timeout(LIMIT_S):
        came = [await clients.first, *[await anext(commands) for _ in range(3)]]
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await answers.aclose()
        last = await anext(commands)
    assert last.close.episode_key == "open"
    assert last.call_id not in [command.call_id for command in came]
    assert not clients.relay._calls


async def test_an_agent_whose_last_part_finds_no_room_is_told_as_lost(
    monkeypatch,
) -> None:
    monkeypatch.setattr(session, "MAX_MESSAGES", 3)
    clients = Clients()
    calls = Stream()
    await clients.come("frozen")
    answers = clients.relay.call_environments(aiter(calls))
    follow = pb.WorkerCommand(
        call_id=1, follow_agent=pb.FollowAgentCommand(episode_key="e")
    )
    calls.say(fleet_pb2.EnvironmentCall(environment="frozen", command=follow))
    answer_comes = asyncio.ensure_future(anext(answers))
    await asyncio.wait_for(clients.first, LIMIT_S)
    for number in range(2, 5):
        calls.say(call("frozen", number))
    last = pb.WorkerCommand(
        call_id=5, reply_part=pb.ReplyPart(episode_key="e", is_last=True)
    )
    calls.say(fleet_pb2.EnvironmentCall(environment="frozen", command=last))
    async with asyncio.timeout(LIMIT_S):
        answers_lost = [await answer_comes, await anext(answers)]
    assert [answer.message.call_id for answer in answers_lost] == [5, 1]
    assert {answer.message.failure.message for answer in answers_lost} == {
        "the client that serves frozen does not read"
    }
