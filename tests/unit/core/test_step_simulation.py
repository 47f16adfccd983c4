"""Steps of a simulated run, by hand, and what must hold for every profile."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.step_simulation import Episode, Profile, Setting, Simulation, resized

ONE = Setting(servers=1, replicas=1, max_staleness=8, group_size=2)
# Replies of 10 tokens take 1 s whatever runs beside them.
PROFILE = Profile(
    setting=ONE,
    groups_per_step=2,
    places=8,
    engine_step_s=0.1,
    engine_token_s=0.0,
    training_fixed_s=0.0,
    training_token_s=0.0,
    publish_s=0.0,
    order_s=0.0,
    pause_s=0.0,
    groups=((Episode(10, 20, 0.0),) * 2,) * 4,
)


def step_s(profile: Profile, **changes: int) -> float:
    return Simulation(profile, replace(profile.setting, **changes)).run().step_s


def test_a_step_takes_what_training_takes_where_that_is_slower() -> None:
    slow = replace(
        PROFILE, training_fixed_s=1.0, training_token_s=0.025, publish_s=0.2, order_s=0.3
    )
    # 4 episodes of 20 tokens: 2 s beside the fixed part.
    assert step_s(slow) == pytest.approx(1.0 + 2.0 + 0.2 + 0.3)
    assert step_s(slow, servers=2) == pytest.approx(3.5)
    assert step_s(slow, replicas=2) == pytest.approx(2.5)


def test_a_step_takes_what_generation_takes_where_that_is_slower() -> None:
    # 8 places make 8 episodes a second; a step has 4.
    assert step_s(PROFILE) == pytest.approx(0.5)
    assert step_s(PROFILE, servers=2) == pytest.approx(0.25)
    # The 8 replies slow each other down: an engine's step takes 0.1 + 8 * 0.05 s.
    assert step_s(replace(PROFILE, engine_token_s=0.05)) == pytest.approx(2.5)


def test_without_staleness_the_fleets_work_one_after_the_other() -> None:
    slow = replace(PROFILE, training_fixed_s=0.5, publish_s=0.25, order_s=0.25)
    assert step_s(slow, max_staleness=0) == pytest.approx(1.0 + 0.5 + 0.25 + 0.25)


def test_fleets_in_turns_never_work_at_the_same_time() -> None:
    slow = replace(PROFILE, training_fixed_s=0.5, publish_s=0.25, order_s=0.25)
    # 8 episodes take the engine a second, and a step has 4 of them.
    rests = replace(slow, resting_order_s=0.25)
    assert step_s(rests) == pytest.approx(0.5 + 0.5 + 0.25 + 0.25)
    assert step_s(rests, max_staleness=0) == pytest.approx(1.0 + 0.5 + 0.25 + 0.25)
    # An engine that rests from the start of training works in the time before.
    assert step_s(replace(slow, resting_order_s=0.0)) == pytest.approx(0.5 + 0.5 + 0.25)


def test_a_bound_lets_so_many_steps_pass_in_the_time_of_a_reply() -> None:
    # A group that starts with version u ends 1 s later, and its step makes version u + 2.
    fast = replace(PROFILE, training_fixed_s=0.2, places=64)
    # The start is still seen a little in the first counted steps.
    assert step_s(fast, max_staleness=1) == pytest.approx((1.0 + 0.2) / 2, rel=0.01)
    assert step_s(fast, max_staleness=2) == pytest.approx((1.0 + 0.2) / 3, rel=0.01)


def test_a_step_waits_for_the_longest_member_of_its_groups() -> None:
    tail = ((Episode(10, 20, 0.0), Episode(50, 60, 0.0)),) * 4
    assert step_s(replace(PROFILE, groups=tail), max_staleness=0) == pytest.approx(5.0)
    beside = ((Episode(10, 20, 2.5), Episode(10, 20, 0.0)),) * 4
    assert step_s(replace(PROFILE, groups=beside), max_staleness=0) == pytest.approx(3.5)


def test_generation_rests_while_weights_are_loaded() -> None:
    paused = replace(PROFILE, publish_s=0.25, pause_s=0.25)
    assert step_s(paused) == pytest.approx(0.5 + 0.25, rel=0.02)


def test_a_group_that_no_server_has_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="places"):
        Simulation(PROFILE, replace(ONE, group_size=16)).run()


def test_the_members_of_a_larger_group_are_those_of_several() -> None:
    groups = [(Episode(k, k, 0.0), Episode(k + 1, k + 1, 0.0)) for k in (1, 10, 100, 1000)]
    larger = resized(groups, 4)
    assert {len(group) for group in larger} == {4}
    assert max(e.sampled for group in larger for e in group) == 1001
    assert [len(group) for group in resized(groups, 1)] == [1] * 4


def test_large_groups_end_when_their_longest_member_ends() -> None:
    drawn = random.Random(0)
    group = tuple(Episode(drawn.randint(1, 99), 100, 0.0) for _ in range(31))
    large = replace(
        PROFILE,
        setting=replace(ONE, group_size=32),
        groups=((*group, Episode(200, 100, 0.0)),),
        places=64,
    )
    assert step_s(large, max_staleness=0) == pytest.approx(20.0)


def test_a_large_run_is_simulated_by_a_part_of_it() -> None:
    # 16 servers with 8 places make 128 episodes a second, and so many groups of 2 are 2 s.
    large = replace(
        PROFILE,
        groups_per_step=128,
        engine_token_s=0.01,
        training_token_s=1e-4,
        setting=replace(ONE, servers=16),
    )
    engine_s = (0.1 + 8 * 0.01) * 10
    assert step_s(large) == pytest.approx(256 / 128 * engine_s, rel=0.01)
    assert step_s(large, servers=20) == pytest.approx(256 / 160 * engine_s, rel=0.02)
    slow = replace(large, training_token_s=0.01)
    assert step_s(slow) == pytest.approx(256 * 20 * 0.01)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    drawn = random.Random(draw(st.integers(0, 99)))
    size = draw(st.sampled_from([2, 4]))
    tail = draw(st.sampled_from([1, 5, 20]))

    def episode() -> Episode:
        sampled = drawn.choice([5, 10, 10 * tail])
        return Episode(sampled, sampled + 10, drawn.choice([0.0, 0.2]))

    return Profile(
        setting=Setting(
            draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 4)), size
        ),
        groups_per_step=draw(st.sampled_from([2, 4])),
        places=draw(st.sampled_from([8, 16])),
        engine_step_s=0.01,
        engine_token_s=draw(st.sampled_from([0.0, 0.001, 0.01])),
        training_fixed_s=draw(st.sampled_from([0.0, 0.3])),
        training_token_s=draw(st.sampled_from([0.0001, 0.01])),
        publish_s=draw(st.sampled_from([0.0, 0.1])),
        order_s=draw(st.sampled_from([0.0, 0.1])),
        pause_s=draw(st.sampled_from([0.0, 0.05])),
        groups=tuple(tuple(episode() for _ in range(size)) for _ in range(32)),
    )


# Groups come in another order, which changes a step by a little in either direction.
CHANCE = 1.06


@settings(max_examples=20, deadline=None)
@given(profiles())
def test_more_of_a_fleet_or_a_larger_bound_never_costs_steps(profile: Profile) -> None:
    now, setting = step_s(profile), profile.setting
    assert step_s(profile, servers=setting.servers + 1) <= now * CHANCE
    assert step_s(profile, replicas=setting.replicas + 1) <= now * CHANCE
    assert step_s(profile, max_staleness=setting.max_staleness + 1) <= now * CHANCE


@settings(max_examples=20, deadline=None)
@given(profiles())
def test_no_step_is_shorter_than_the_work_of_either_fleet(profile: Profile) -> None:
    found = Simulation(profile, profile.setting).run()
    work = [sum(e.sampled for e in group) for group in profile.groups]
    tokens = sum(work) / len(work) * profile.groups_per_step
    full_s = profile.engine_step_s / profile.places + profile.engine_token_s
    generation_s = tokens * full_s / profile.setting.servers
    trained = sum(e.trained for group in profile.groups for e in group) / len(work)
    training_s = profile.training_s(trained * profile.groups_per_step, profile.setting.replicas)
    # The counted steps have more or less than their share of the work.
    assert found.step_s >= 0.9 * max(generation_s, training_s + profile.publish_s)
    assert 0.0 <= found.waiting_share <= 1.0
    assert 0.0 <= found.places_share <= 1.0
