import math
from collections import Counter

import pytest
from slipstream.core.types import ServerId
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.learner.controller.tasks.environments import EnvironmentBook
from slipstream.v1 import environment_pb2, trajectory_pb2

KEY = ServerKey(ServerId("a"), 1)


def make_book(*weights: float, num_tasks: int = 5) -> EnvironmentBook:
    book = EnvironmentBook(RunState(), seed=1, max_failed_groups=2)
    for index, weight in enumerate(weights):
        add(book, f"e{index}", weight, num_tasks)
    return book


def add(book, name, weight=1.0, num_tasks=5):
    purpose = trajectory_pb2.EPISODE_PURPOSE_TRAINING
    entry = book.add(environment_pb2.EnvironmentSpec(name=name, weight=weight, purpose=purpose))
    book.loaded(name, KEY, num_tasks)
    return entry


def accept(book, count):
    dealt = Counter()
    for _ in range(count):
        entry = book.next_for(KEY, {}, 4)
        entry.counts.accepted += 1
        dealt[entry.spec.name] += 1
    return dealt


def test_weights_govern_accepted_groups():
    assert accept(make_book(3.0, 1.0), 40) == {"e0": 30, "e1": 10}


@pytest.mark.parametrize(
    ("one_in", "trained", "leased"), [(1, 20, 20), (2, 20, 40), (4, 13, 53), (1000, 0, 53)]
)
@pytest.mark.parametrize("how", ["filtered", "failed"])
def test_shares_are_of_trained_groups_within_twice_the_leases(how, one_in, trained, leased):
    book, counts = make_book(1.0, 1.0), Counter()
    while counts.total() < 40 if one_in <= 2 else counts["e1"] < 27:
        entry = book.next_for(KEY, {}, 4)
        name, number = entry.spec.name, entry.counts.accepted + entry.counts.failed + 1
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
    # One that comes again is level with the others already.
    assert book.head_start(late) == late.counts.head_start == 100.0
    assert accept(book, 10) == {"e0": 5, "late": 5}


def tasks(book, number):
    """The next tasks of the first environment, each leased, and their seeds."""
    entry, found = book.entries["e0"], []
    for _ in range(number):
        found.append(book.next_task(entry))
        entry.counts.next_number += 1
    return found


def test_every_task_comes_once_before_any_comes_again():
    book = make_book(1.0, num_tasks=7)
    rounds = [[task for task, _ in tasks(book, 7)] for _ in range(3)]
    assert all(sorted(each) == list(range(7)) for each in rounds)
    assert rounds[0] != rounds[1]


def test_the_order_of_tasks_and_their_seeds_follow_from_the_seed():
    first, second = make_book(1.0), make_book(1.0)
    assert tasks(first, 9) == tasks(second, 9)


def test_an_environment_without_end_goes_on_counting():
    book = make_book(1.0, num_tasks=0)
    assert [task for task, _ in tasks(book, 4)] == [0, 1, 2, 3]


def fail(book, number, *, oldest_open=math.inf):
    return book.group_failed("e0", number, "broken", oldest_open=oldest_open)


def test_an_environment_whose_newest_groups_all_failed_is_suspended():
    book = make_book(1.0, 1.0)
    assert not fail(book, 0)
    assert fail(book, 1)
    assert accept(book, 4) == {"e1": 4}
    assert book.entries["e0"].cause == "broken"


def test_a_complete_group_clears_the_count_of_failures_long_before_its_batch():
    book = make_book(1.0)
    fail(book, 0)
    book.group_complete("e0")
    assert not fail(book, 2)


def test_failures_do_not_count_before_older_groups_have_ended():
    # What fails at once ends before groups that were leased earlier and may be fine.
    book = make_book(1.0)
    assert not fail(book, 1, oldest_open=0)
    assert not fail(book, 2, oldest_open=0)
    assert not fail(book, 5, oldest_open=2)
    assert fail(book, 0, oldest_open=3)


def test_a_client_is_leased_no_more_than_it_has_room_for():
    book = make_book(1.0)
    book.entries["e0"].client_episodes = 6
    assert book.next_for(KEY, {"e0": 2}, 4) is not None
    assert book.next_for(KEY, {"e0": 3}, 4) is None


def test_nothing_is_leased_on_a_server_that_has_not_loaded_it():
    book = make_book(1.0)
    assert book.next_for(ServerKey(ServerId("b"), 1), {}, 4) is None
    book.server_lost(KEY)
    assert book.next_for(KEY, {}, 4) is None


def test_each_cause_of_a_failure_or_an_end_is_told_once_and_only_the_first_few():
    (entry,) = make_book(1.0).training()
    for kind in ("failure", "worker"):
        causes = ["a", "a", "b", "a", "c", "d", "b", "d"]
        assert [cause for cause in causes if entry.is_news(kind, cause)] == ["a", "b", "c"]


def test_an_evaluation_tells_its_newest_round_only():
    book = make_book(1.0)
    spec = environment_pb2.EnvironmentSpec(
        name="held", weight=1.0, purpose=trajectory_pb2.EPISODE_PURPOSE_EVALUATION
    )
    held = book.add(spec)
    assert not held.describe().HasField("newest_round")
    # The second is in the configuration no more.
    first = {"held": {"reward_mean": 0.25, "pass_at_1": 0.5}, "gone": {"reward_mean": 1.0}}
    for version, found in ((0, first), (50, {"held": {"reward_mean": 0.75}})):
        record = kinds.Evaluation(version=version, episodes=1, failed=0, evaluations=found)
        book._state.apply(record)
    newest = held.describe().newest_round
    assert (newest.step, dict(newest.numbers)) == (50, {"reward_mean": 0.75})
    assert not book.entries["e0"].describe().HasField("newest_round")
