import dataclasses

import pytest
from pydantic import JsonValue
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import EnvironmentSection
from slipstream.core.types import Branch, Status, Trajectory
from slipstream.learner.algorithms.episodes import RewardedEpisode
from slipstream.learner.algorithms.filters import unequal_rewards
from slipstream.learner.algorithms.groups import is_counted, is_trained, shaped_rewards
from slipstream.learner.algorithms.rewards import overlong
from support.fakes import wrong_algorithms
from support.fakes.fake_trajectories import make_trajectory
from support.fakes.small_configs import small_config

PENALTY: dict[str, JsonValue] = {
    "reward": "overlong",
    "reward_args": {"penalty": 0.5, "cache_tokens": 4},
}


def config(**algorithm: JsonValue) -> Config:
    lengths = {"max_reply_tokens": 10, "max_episode_tokens": 64}
    return small_config(algorithm={"group_size": 4, **algorithm}, sampling=lengths)


def shaped(trajectory: Trajectory, settings: Config) -> dict[str, float]:
    (sides,) = shaped_rewards([trajectory], settings)
    return {side.side: side.reward for side in sides}


def has_variance(group: list[Trajectory], settings: Config) -> bool:
    sides = shaped_rewards(group, settings)
    return unequal_rewards([side for episode in sides for side in episode])


def trajectory(reward: float, *, reply: int = 1, truncated: bool = False) -> Trajectory:
    status = Status.TRUNCATED if truncated else Status.COMPLETED
    return dataclasses.replace(make_trajectory(3, reply), reward=reward, status=status)


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (6, 0.0), (7, 0.25), (9, 0.75), (10, 1.0), (99, 1.0)]
)
def test_overlong_penalty_rises_linearly_over_the_last_tokens(tokens: int, penalty: float) -> None:
    episode = RewardedEpisode(0.0, {}, False, (tokens,), 10, "e", 0)
    assert overlong([episode], penalty=1.0, cache_tokens=4) == [-penalty]


def test_reward_is_the_environments_without_a_penalty() -> None:
    assert shaped(trajectory(0.7, reply=10), config()) == {"": 0.7}


def test_penalty_is_taken_off_the_reward_by_the_longest_reply() -> None:
    settings = config(**PENALTY)
    assert shaped(trajectory(1.0, reply=8), settings) == {"": 1.0 - 0.5 * 0.5}
    turns = dataclasses.replace(trajectory(1.0, reply=15), run_lengths=(3, 7, 0, 8))
    assert shaped(turns, settings) == {"": 0.75}


@pytest.mark.parametrize(
    ("own", "reply", "penalty"),
    [(0, 8, 0.25), (64, 8, 0.25), (8, 6, 0.25), (8, 8, 0.5), (2, 1, 0.25)],
)
def test_an_environment_with_a_limit_of_its_own_pays_by_that(own, reply, penalty):
    """The last case has a limit below the tokens over which the penalty rises."""
    short = dataclasses.replace(trajectory(1.0, reply=reply), max_reply_tokens=own)
    assert shaped(short, config(**PENALTY)) == {"": 1.0 - penalty}


def test_truncated_episodes_count_unless_they_are_filtered() -> None:
    cut = trajectory(1.0, truncated=True)
    assert is_counted(cut, config().algorithm)
    assert not is_counted(cut, config(leave_out_truncated=True).algorithm)
    assert is_counted(trajectory(1.0), config(leave_out_truncated=True).algorithm)


def test_group_has_variance_when_two_rewards_differ() -> None:
    assert has_variance([trajectory(1.0), trajectory(0.0)], config())
    assert not has_variance([trajectory(1.0), trajectory(1.0)], config())


def test_variance_is_that_of_the_rewards_with_their_penalties() -> None:
    alike = [trajectory(1.0, reply=2), trajectory(1.0, reply=10)]
    assert not has_variance(alike, config())
    assert has_variance(alike, config(**PENALTY))
    # 1.0 - 0.5 and 0.5: the penalty takes the difference away.
    evened = [trajectory(1.0, reply=10), trajectory(0.5, reply=2)]
    assert not has_variance(evened, config(**PENALTY))


def test_filtered_episodes_give_no_variance() -> None:
    group = [trajectory(1.0), trajectory(1.0), trajectory(0.0, truncated=True)]
    assert has_variance(group, config())
    assert not has_variance(group, config(leave_out_truncated=True))
    assert not has_variance(group[2:], config(leave_out_truncated=True))


@pytest.mark.parametrize("name", ["mean_of_rewards", "first_decides"])
def test_a_filter_is_never_called_with_a_group_in_which_no_episode_counts(name: str) -> None:
    own = config(filter=f"{wrong_algorithms.__name__}:{name}", leave_out_truncated=True)
    cut = [trajectory(1.0, truncated=True)] * 2
    assert not is_trained(cut, own)
    assert is_trained([*cut, trajectory(1.0)], own)
    every = config(leave_out_truncated=True)
    assert is_trained(cut, every)


def played(first: float, second: float, *, reward: float = 0.0) -> Trajectory:
    made = dataclasses.replace(make_trajectory(3, 4), run_lengths=(1, 1, 1, 1, 1, 2))
    branches = (Branch(2, 1.0, "a", first), Branch(2), Branch(2, 1.0, "b", second))
    return dataclasses.replace(made, reward=reward, branches=branches)


def test_a_name_with_a_reward_of_its_own_is_a_side() -> None:
    episode = played(0.25, -1.0, reward=0.5)
    assert shaped(episode, config()) == {"a": 0.25, "": 0.5, "b": -1.0}
    cut = config(reward="overlong", reward_args={"penalty": 0.5, "cache_tokens": 10})
    # The longest reply has 2 of 10 tokens.
    assert shaped(episode, cut) == pytest.approx({"a": 0.15, "": 0.4, "b": -1.1})


def test_a_group_has_variance_when_one_side_has_it() -> None:
    assert has_variance([played(1.0, 0.5), played(0.0, 0.5)], config())
    assert has_variance([played(1.0, 0.5), played(1.0, 0.0)], config())
    # Two sides are not compared with each other.
    assert not has_variance([played(1.0, 0.5), played(1.0, 0.5)], config())


def test_a_group_is_judged_by_the_settings_of_its_environment() -> None:
    name = trajectory(0.0).environment
    alike = [trajectory(1.0, reply=10), trajectory(1.0, reply=1)]
    settings = config()
    environment = EnvironmentSection.model_validate(
        {"name": name, "reference": "m:E", "algorithm": PENALTY}
    )
    own = settings.model_copy(update={"environments": (environment,)})
    assert has_variance(alike, own)
    others = [dataclasses.replace(t, environment="another") for t in alike]
    assert not has_variance(others, own)
