"""Each environment's share of each batch, and what a batch waits for because of it."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.staleness import choose_batch
from slipstream.learner.controller.leasing.shares import BatchChoice, Mixture, choose
from support.references.plain_shares import MixedGroup, Moment, share_faults

WORKS = "works"


def groups_of(*texts: str, deadline: int = 99) -> list[MixedGroup]:
    """Groups as in "a a+": two of environment a of which a server holds the first."""
    groups = []
    for word in " ".join(texts).split():
        group = MixedGroup(
            group_id=f"g{len(groups)}",
            environment=word.rstrip("+"),
            deadline_step=deadline,
            is_complete=word.endswith("+"),
            holder=WORKS,
        )
        groups.append(group)
    return groups


def chosen(
    groups: Sequence[MixedGroup], groups_per_step: int, step: int = 0, **facts: Any
) -> BatchChoice[Any] | None:
    names = {group.environment for group in groups}
    plain_facts = {
        "weights": dict.fromkeys(names, 1.0),
        "working_servers": {WORKS},
    }
    mixture = Mixture(**plain_facts | facts)
    return choose(groups, step, groups_per_step, mixture)


def seats(choice: BatchChoice[Any] | None) -> dict[str, int]:
    assert choice is not None
    names = [group.environment for group in choice.groups]
    return dict(Counter(names))


def test_environments_of_equal_weight_share_a_batch_though_one_was_leased_and_finished_first():
    groups = groups_of("a+ " * 8, "b+ " * 8)
    choice = chosen(groups, 8)
    assert seats(choice) == {"a": 4, "b": 4}
    assert choice.awaited == []
    assert choice.groups == groups[:4] + groups[8:12]


def test_a_batch_waits_for_the_groups_that_a_server_holds_and_for_no_more_of_them():
    groups = groups_of("a+ " * 8, "b+ b b b b b")
    choice = chosen(groups, 8)
    assert [group.group_id for group in choice.awaited] == ["g9", "g10", "g11"]


@pytest.mark.parametrize("holder", [None, "stale"])
def test_a_batch_waits_for_no_group_without_a_server_that_works(
    holder: str | None,
) -> None:
    groups = groups_of("a+ " * 8, "b+ b b b")
    held_by = []
    for group in groups:
        if not group.is_complete:
            group = dataclasses.replace(group, holder=holder)
        held_by.append(group)
    choice = chosen(held_by, 8)
    assert seats(choice) == {"a": 7, "b": 1}
    assert choice.awaited == []


@pytest.mark.parametrize(
    ("num_ended", "num_awaited"),
    [
        (1, 4),
        (2, 3),
        (7, 1),
        (8, 0),
    ],
)
def test_two_ended_groups_let_one_seat_pass(num_ended: int, num_awaited: int) -> None:
    groups = groups_of("a+ " * 8, "b b b b")
    choice = chosen(groups, 8, ended={"b": num_ended})
    assert len(choice.awaited) == num_awaited
    assert len(choice.groups) == 8


def test_finished_groups_lose_no_seat_to_ended_ones():
    groups = groups_of("a+ " * 8, "b+ b+ b+ b+")
    choice = chosen(groups, 8, ended={"b": 99})
    assert seats(choice) == {"a": 4, "b": 4}


def test_nothing_but_rounding_goes_on_to_the_next_batch():
    alone = groups_of("a+ " * 8)
    both = groups_of("a+ " * 8, "b+ " * 8)
    first = chosen(alone, 4)
    second = chosen(both, 4, owed=first.owed)
    assert seats(second) == {"a": 2, "b": 2}
    third = chosen(both, 3, owed=second.owed)
    assert seats(third) == {"a": 2, "b": 1}
    fourth = chosen(both, 3, owed=third.owed)
    assert seats(fourth) == {"a": 1, "b": 2}


def test_a_deadline_goes_before_a_share():
    early = groups_of("a+ a+ a+", deadline=1)
    late = groups_of("b+ b+ b+", deadline=4)
    choice = chosen([*early, *late], 3, step=1)
    assert seats(choice) == {"a": 3}


@pytest.mark.parametrize(("owed_to_b", "second"), [(0.1, "b"), (-0.1, "c")])
def test_the_environment_to_which_least_is_owed_gives_way_to_a_deadline(
    owed_to_b: float, second: str
) -> None:
    early = groups_of("a+", deadline=1)
    late = groups_of("b+ b+ c+ c+", deadline=4)
    choice = chosen(
        [*early, *late],
        2,
        step=1,
        weights={"a": 0.01, "b": 1.0, "c": 1.0},
        owed={"b": owed_to_b, "c": -owed_to_b},
    )
    assert seats(choice) == {"a": 1, second: 1}


def test_a_due_group_is_waited_for_as_without_shares():
    early = groups_of("a", deadline=1)
    late = groups_of("b+ b+ b+", deadline=4)
    assert chosen([*early, *late], 3, step=1) is None


def test_an_environment_whose_client_has_not_come_again_has_the_weight_of_the_default():
    groups = groups_of("a+ " * 4, "gone+ " * 4)
    choice = chosen(groups, 4, weights={"a": 3.0})
    assert seats(choice) == {"a": 3, "gone": 1}


weights = st.lists(
    st.sampled_from([0.01, 0.3, 1.0, 1.5, 7.0]),
    min_size=2,
    max_size=4,
)


@given(weights, st.integers(1, 9), st.integers(1, 12))
def test_the_share_of_all_batches_is_right_up_to_one_group(
    every_weight: list[float], groups_per_step: int, num_steps: int
) -> None:
    names = [f"e{number}" for number in range(len(every_weight))]
    by_name = dict(zip(names, every_weight, strict=True))
    words = [f"{name}+ " * groups_per_step for name in names]
    groups = groups_of(*words)
    owed: Mapping[str, float] = {}
    trained: Counter[str] = Counter()
    for step in range(1, num_steps + 1):
        choice = chosen(groups, groups_per_step, weights=by_name, owed=owed)
        trained.update(seats(choice))
        owed = choice.owed
        for name, weight in by_name.items():
            share = weight / sum(every_weight)
            num_groups = groups_per_step * step
            assert abs(trained[name] - share * num_groups) <= 1 + 1e-9


facts_of_groups = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(3, 6),
        st.booleans(),
        st.sampled_from([None, "stale", WORKS]),
    ),
    max_size=10,
)


@given(
    facts_of_groups,
    st.integers(1, 4),
    st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3),
    st.tuples(*[st.floats(-1, 1)] * 3),
    st.tuples(*[st.integers(0, 5)] * 3),
)
def test_a_choice_keeps_staleness_waits_for_held_groups_alone_and_is_by_shares(
    facts: list[tuple[str, int, bool, str | None]],
    groups_per_step: int,
    every_weight: tuple[float, ...],
    owed: tuple[float, ...],
    ended: tuple[int, ...],
) -> None:
    groups = []
    for fact in facts:
        name = f"g{len(groups)}"
        groups.append(MixedGroup(name, *fact))
    moment = Moment(
        groups=groups,
        step=3,
        groups_per_step=groups_per_step,
        weights=dict(zip("abc", every_weight, strict=True)),
        owed=dict(zip("abc", owed, strict=True)),
        ended=dict(zip("abc", ended, strict=True)),
        working_servers=frozenset({WORKS}),
    )
    choice = choose(
        groups,  # type: ignore[type-var]
        3,
        groups_per_step,
        Mixture(
            weights=moment.weights,
            owed=moment.owed,
            ended=moment.ended,
            working_servers=moment.working_servers,  # type: ignore[arg-type]
        ),
    )
    without_shares = choose_batch(groups, 3, groups_per_step)
    assert (choice is None) == (without_shares is None)
    if choice is None:
        return
    assert len(choice.groups) == groups_per_step
    assert choice.groups == [group for group in groups if group in choice.groups]
    assert all(group.holder == WORKS for group in choice.awaited)
    assert moment.keeps_staleness(choice.groups)
    assert share_faults(moment, choice.groups) == []
    waited_for = {group.environment for group in choice.awaited}
    for group in groups:
        # An environment is waited for only when all that it has finished is in the batch, but for
        # groups of later deadlines that gave way to earlier ones.
        if group.environment in waited_for and group.is_complete:
            latest = max(other.deadline_step for other in choice.groups)
            assert group in choice.groups or group.deadline_step >= latest


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("weight", [0.5, 1.0, 9.0])
@pytest.mark.parametrize("groups_per_step", [1, 3, 8])
def test_groups_that_are_filtered_hold_a_batch_up_for_twice_their_seats_at_most(
    every: int, weight: float, groups_per_step: int
) -> None:
    """All groups of environment b are filtered, or all but one in `every`."""
    owed: Mapping[str, float] = {}
    numbers = itertools.count(1)
    total_ended = 0
    total_finished = 0
    for _ in range(20):
        finished = 0
        ended = 0
        while True:
            unfinished = "b " * 2 * groups_per_step
            groups = groups_of("a+ " * groups_per_step, "b+ " * finished, unfinished)
            choice = chosen(
                groups,
                groups_per_step,
                weights={"a": 1.0, "b": weight},
                owed=owed,
                ended={"b": ended},
            )
            if not choice.awaited:
                break
            if every > 1 and next(numbers) % every == 0:
                finished += 1
            else:
                ended += 1
        owed = choice.owed
        total_ended += ended
        total_finished += finished
        assert seats(choice).get("b", 0) == finished
    share = 20 * groups_per_step * weight / (1.0 + weight)
    assert total_finished + total_ended / 2 == pytest.approx(share, abs=20)
    assert total_ended <= 2 * (share + 1)


def test_a_choice_is_the_same_for_the_same_facts_in_any_order_of_names():
    groups = groups_of("c+ a+ b+ " * 6)
    weights = {"c": 1.0, "a": 1.0, "b": 1.0}
    owed = {"b": 0.25, "a": -0.25}
    first = chosen(groups, 5, weights=weights, owed=owed)
    second = chosen(
        groups,
        5,
        weights=dict(reversed(weights.items())),
        owed=dict(reversed(owed.items())),
    )
    assert first == second
    share = 5 / 3
    assert first.owed["a"] == pytest.approx(share - 0.25 - 1)
    assert first.owed["b"] == pytest.approx(share + 0.25 - 2)
    assert first.owed["c"] == pytest.approx(share - 2)
