"""What the advice says of a run whose slow part is known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from slipstream.core.advice import (
    CHANGES,
    LEASE_WAITS,
    Advice,
    advise,
    profile_from_json,
    profile_to_json,
    waits_for,
)
from slipstream.core.step_simulation import Episode, Profile, Setting

SETTING = Setting(servers=2, replicas=2, max_staleness=2, group_size=4)
# 16 episodes a step: 1 s on a server with its 16 places full, alone 0.5 s on two of them.
PROFILE = Profile(
    setting=SETTING,
    groups_per_step=4,
    places=16,
    engine_step_s=0.01,
    engine_token_s=0.0,
    training_fixed_s=0.0,
    training_token_s=0.0,
    publish_s=0.01,
    order_s=0.0,
    pause_s=0.0,
    groups=((Episode(100, 120, 0.0),) * 4,) * 8,
)


def gains(profile: Profile) -> dict[str, float]:
    return {each.name: each.gain for each in advise(profile).alternatives}


def test_a_run_whose_servers_are_slow_wants_servers() -> None:
    # Without a bound that matters two servers with 16 places make two steps a second.
    slow = replace(PROFILE, setting=replace(SETTING, max_staleness=8))
    found = gains(slow)
    assert found["server_more"] == pytest.approx(0.5, abs=0.03)
    assert found["server_less"] == pytest.approx(-0.5, abs=0.03)
    assert found["rank_more"] == pytest.approx(0.0, abs=0.01)
    assert advise(slow).best.name in ("server_more", "group_halved")


def test_fleets_that_share_devices_in_turns_are_advised_no_other_sizes() -> None:
    shared = replace(PROFILE, resting_order_s=0.0)
    assert set(gains(shared)) == {
        *("staleness_doubled", "staleness_halved", "group_doubled", "group_halved")
    }
    assert advise(shared).wanted_servers == SETTING.servers


def test_a_run_whose_trainer_is_slow_wants_ranks_and_gives_servers_back() -> None:
    # 16 * 120 tokens of 2 ms each on two ranks.
    slow = replace(PROFILE, training_token_s=0.002)
    found = gains(slow)
    assert found["rank_more"] == pytest.approx(0.5, abs=0.03)
    assert found["rank_less"] == pytest.approx(-0.5, abs=0.03)
    assert found["server_more"] == pytest.approx(0.0, abs=0.01)
    assert advise(slow).wanted_servers == 1


def test_a_run_that_waits_for_long_replies_wants_a_larger_bound() -> None:
    long = replace(PROFILE, setting=replace(SETTING, max_staleness=1), places=64)
    found = gains(long)
    assert found["staleness_doubled"] == pytest.approx(0.5, abs=0.05)
    assert found["server_more"] == pytest.approx(0.0, abs=0.01)
    assert found["staleness_halved"] < -0.3


def test_only_changes_that_could_be_made_are_advised() -> None:
    least = replace(PROFILE, setting=Setting(1, 1, 0, 2), places=2)
    assert {*gains(least)} == {"server_more", "rank_more", "staleness_doubled"}
    assert {*gains(PROFILE)} == {*CHANGES}


def test_the_wanted_fleet_lies_between_half_and_twice_the_present_one() -> None:
    hungry = replace(PROFILE, setting=replace(SETTING, max_staleness=64))
    assert advise(hungry).wanted_servers == 4
    idle = replace(PROFILE, setting=replace(SETTING, servers=6), training_fixed_s=9.0)
    assert advise(idle).wanted_servers == 3


def test_the_same_profile_gives_the_same_advice() -> None:
    advice: Advice = advise(PROFILE)
    assert advise(profile_from_json(json.loads(json.dumps(profile_to_json(PROFILE))))) == advice
    assert advice.predictions()[SETTING] == advice.now.steps_per_s


@pytest.mark.parametrize("damage", [{}, {"groups": []}, {"groups": [[["a", 1, 1]]]}])
def test_a_damaged_profile_is_refused(damage: dict[str, object]) -> None:
    table = profile_to_json(PROFILE) | damage if damage else {}
    with pytest.raises((KeyError, TypeError, ValueError)):
        profile_from_json(table)


@pytest.mark.parametrize(
    ("waited_s", "cause", "words"),
    [
        (0.0, "staleness", "the servers wait for the trainer"),
        (0.0, "slots", "no fleet waits"),
        (0.5, "slots", "the trainer waits for the servers, which are full"),
        (0.5, "staleness", "long replies"),
        (0.5, "queue", "room in the queue"),
        (0.5, None, "the trainer waits for groups"),
    ],
)
def test_the_words_say_which_fleet_waits(waited_s: float, cause: str | None, words: str) -> None:
    waits = {f"lease_wait_{name}_s": float(name == cause) for name in LEASE_WAITS}
    assert words in waits_for({"step_s": 1.0, "groups_wait_s": waited_s, **waits})


def test_a_run_without_a_step_waits_for_nothing_known() -> None:
    assert waits_for({}) == ""
