"""Steps of simulated runs, counted by hand."""

import dataclasses
from collections.abc import Sequence

import pytest
from slipstream.extensions.what_if.simulation import (
    EngineSpeed,
    Episode,
    FleetSizes,
    Prediction,
    Simulation,
    Work,
)

# Ten engine steps of 0.1 s, however many replies run.
STEADY = EngineSpeed(step_s=0.1, reply_s=0.0)
SYNCHRONOUS = FleetSizes(
    num_servers=1,
    max_episodes=8,
    groups_per_step=1,
    max_staleness=0,
)


def work_of(
    *groups: Sequence[Episode],
    training_s: float = 1.0,
    other_s: float = 0.0,
    pause_s: float = 0.0,
) -> Work:
    return Work(
        groups=groups,
        groups_per_step=1,
        training_s=[training_s],
        other_s=[other_s],
        pause_s=pause_s,
    )


def predicted(
    work: Work,
    speed: EngineSpeed = STEADY,
    **sizes: int,
) -> Prediction:
    fleet = dataclasses.replace(SYNCHRONOUS, **sizes)
    return Simulation(work, speed, fleet, num_steps=48).run()


TEN_TOKENS = [Episode(tokens=10, rest_s=0.0)]


def test_without_a_lag_generation_and_training_follow_each_other() -> None:
    prediction = predicted(work_of(TEN_TOKENS))
    assert prediction.step_s == pytest.approx(2.0)
    assert prediction.tokens_per_s == pytest.approx(5.0)
    assert prediction.trainer_waits == pytest.approx(0.5)
    assert prediction.servers_idle == pytest.approx(0.5)
    assert prediction.lag_mean == pytest.approx(0.0)


def test_pauses_environments_and_other_work_lengthen_such_a_step() -> None:
    resting = [Episode(tokens=10, rest_s=0.5)]
    work = work_of(
        resting,
        other_s=0.25,
        pause_s=0.75,
    )
    # The engine pauses for 0.75 s from the new version on, of which half a second is rest anyway.
    assert predicted(work).step_s == pytest.approx(0.75 + 1.0 + 1.0 + 0.25)


def test_with_a_bound_of_one_a_slow_trainer_never_waits() -> None:
    prediction = predicted(work_of(TEN_TOKENS, training_s=3.0), max_staleness=1)
    assert prediction.step_s == pytest.approx(3.0)
    assert prediction.trainer_waits == pytest.approx(0.0)
    # A group starts with each version and is trained by the next step but one.
    assert prediction.lag_mean == pytest.approx(1.0)
    assert prediction.servers_idle == pytest.approx(2 / 3)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_long_reply_has_as_many_steps_as_the_bound_and_one(
    max_staleness: int,
) -> None:
    # 100 engine steps of 0.1 s: the law of docs/internals/staleness.md with a trainer of no time.
    work = work_of([Episode(tokens=100, rest_s=0.0)], training_s=1e-6)
    prediction = predicted(work, max_staleness=max_staleness)
    assert prediction.step_s == pytest.approx(10.0 / (max_staleness + 1), rel=0.05)


def test_servers_share_the_replies_of_a_step() -> None:
    by_reply = EngineSpeed(step_s=0.0, reply_s=0.01)
    work = work_of([Episode(tokens=100, rest_s=0.0)], training_s=0.5)
    one = predicted(work, by_reply, groups_per_step=2)
    two = predicted(work, by_reply, groups_per_step=2, num_servers=2)
    # Twice as many groups are trained in twice the time.
    assert one.step_s == pytest.approx(2.0 + 1.0)
    assert two.step_s == pytest.approx(1.0 + 1.0)


def test_a_server_without_room_runs_groups_one_after_the_other() -> None:
    prediction = predicted(work_of(TEN_TOKENS), groups_per_step=2, max_episodes=1)
    assert prediction.step_s == pytest.approx(2 * 1.0 + 2 * 1.0)


def test_a_group_goes_on_without_the_members_that_failed() -> None:
    pair = [Episode(tokens=10, rest_s=0.0), Episode(tokens=20, rest_s=0.0)]
    prediction = predicted(work_of(pair, TEN_TOKENS))
    # Steps of two and of one second of generation by turns, and a second of training each.
    assert prediction.step_s == pytest.approx(2.5)
    assert prediction.tokens_per_s == pytest.approx((30 + 10) / 5.0)


def test_replies_that_run_on_have_tokens_of_several_versions() -> None:
    # A reply of three seconds and the step that trains it must end within three steps.
    long = [Episode(tokens=30, rest_s=0.0)]
    prediction = predicted(work_of(long, training_s=1.0), max_staleness=2)
    assert prediction.step_s == pytest.approx(4 / 3)
    # While the trainer waits for a second, no version comes: of three replies in a row the lags of
    # their seconds are 2, 1, 0, then 2, 1, 1, then 2, 2, 1.
    assert prediction.lag_mean == pytest.approx(12 / 9)
    assert prediction.servers_idle == pytest.approx(0.0)
