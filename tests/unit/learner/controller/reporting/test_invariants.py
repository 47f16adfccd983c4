"""What each step must keep, by its row and its groups."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from slipstream.core.settings.config import Config
from slipstream.core.types import GroupId, Trajectory
from slipstream.learner.controller.reporting.invariants import broken_invariants
from support.fakes.fake_trajectories import make_trajectory
from support.fakes.small_configs import config_with

FLOAT32 = {"model.dtype": "float32"}
# A step as it should be: all tokens are of lag 0, and learner and engine agree.
ROW = {
    "step": 1.0,
    "lag_max": 0.0,
    "trained_tokens": 64.0,
    "logprob_gap_tokens": 64.0,
    "logprob_gap_mean": 2e-7,
    "importance_weight_mean": 1.0,
}
PENALTY = {"algorithm.reward": "overlong", "algorithm.reward_args": {"cache_tokens": 2}}


def episodes(*rewards: float) -> list[Trajectory]:
    episode = make_trajectory(3, 4)
    episode = dataclasses.replace(episode, group_id=GroupId("g1"))
    return [
        dataclasses.replace(episode, member=member, reward=reward)
        for member, reward in enumerate(rewards)
    ]


def broken(
    settings: Mapping[str, Any],
    row: Mapping[str, float] | None = None,
    group: Sequence[Trajectory] = (),
    advantages: Sequence[float] = (),
) -> dict[str, str]:
    """The texts of the invariants that a step of one group breaks, by name."""
    ids = [member.trajectory_id for member in group]
    by_id = dict(zip(ids, advantages, strict=True))
    step = ROW | dict(row or {})
    config = config_with(settings)
    groups = [group] if group else []
    texts: dict[str, str] = {}
    for invariant in broken_invariants(config, step, groups, by_id):
        texts[invariant.name] = invariant.text
    return texts


def test_a_step_as_it_should_be_breaks_nothing() -> None:
    mixed = episodes(1.0, 0.0)
    assert broken(FLOAT32, group=mixed, advantages=(1.0, -1.0)) == {}
    right = episodes(1.0, 1.0)
    assert broken(FLOAT32, group=right, advantages=(0.0, 0.0)) == {}


@pytest.mark.parametrize(
    ("settings", "gap", "is_broken"),
    [
        (FLOAT32, 9e-4, False),
        (FLOAT32, 0.21, True),
        ({"model.dtype": "float16"}, 0.01, False),
        ({"model.dtype": "float16"}, 0.03, True),
        ({}, 0.037, False),
        ({}, 0.21, True),
        ({"rollout_server.engine": {"kv_cache_dtype": "fp8"}}, 0.3, False),
        # The learner's policy is over the same tokens.
        (FLOAT32 | {"sampling.top_p": 0.8}, 0.21, True),
        # By design, and no weight is taken from it.
        (
            FLOAT32
            | {
                "sampling.top_p": 0.8,
                "algorithm.weight": "none",
                "sampling.max_images": 1,
            },
            0.21,
            False,
        ),
        # Tokens were sampled with keys and values of older weights.
        (FLOAT32 | {"rollout_server.recompute_context": False}, 0.21, False),
    ],
)
def test_engine_and_learner_agree_within_rounding_at_lag_0(
    settings: dict[str, Any], gap: float, is_broken: bool
) -> None:
    texts = broken(settings, {"logprob_gap_mean": gap})
    assert ("gap" in texts) == is_broken
    if is_broken:
        assert f"differ by {gap:.2g} on average" in texts["gap"]


def test_a_few_tokens_or_none_of_lag_0_say_nothing() -> None:
    few = {
        "logprob_gap_mean": 0.3,
        "logprob_gap_tokens": 15.0,
    }
    assert broken(FLOAT32, few) == {}
    row_without = ROW | {"logprob_gap_tokens": 0.0}
    del row_without["logprob_gap_mean"]
    config = config_with(FLOAT32)
    assert not list(broken_invariants(config, row_without, [], {}))


PRESENT = {
    "algorithm.mini_batches": 2,
    "algorithm.weight_args": {"to": "present"},
}


@pytest.mark.parametrize(
    ("settings", "max_lag", "is_broken"),
    [
        ({}, 0.0, True),
        # A weight is what corrects tokens of older versions.
        ({}, 1.0, False),
        ({"algorithm.weight": "none"}, 0.0, False),
        ({"algorithm.weight_args": {"token_band": [0.5, 1.5]}}, 0.0, False),
        (PRESENT, 0.0, False),
    ],
)
def test_tokens_of_the_newest_weights_have_the_weight_1(
    settings: dict[str, Any], max_lag: float, is_broken: bool
) -> None:
    row = {
        "importance_weight_mean": 0.81,
        "lag_max": max_lag,
    }
    texts = broken(FLOAT32 | settings, row)
    assert ("weight" in texts) == is_broken
    if is_broken:
        assert "have the importance weight 0.81 on average, not 1" in texts["weight"]


def test_a_filter_leaves_no_group_of_equal_rewards() -> None:
    filtered = {"algorithm.filter": "unequal_rewards"}
    right = episodes(1.0, 1.0)
    mixed = episodes(1.0, 0.0)
    advantages = (0.0, 0.0)
    texts = broken(filtered, group=right, advantages=advantages)
    assert texts["filter"].startswith(
        "step 1: 100% of the groups have equal rewards although"
    )
    assert broken(filtered, group=mixed, advantages=advantages) == {}
    assert broken({}, group=right, advantages=advantages) == {}


def test_a_later_start_of_the_run_reads_from_the_row_what_a_filter_let_pass() -> None:
    config = config_with({"algorithm.filter": "unequal_rewards"})
    row = ROW | {"equal_rewards_fraction": 0.5}
    (invariant,) = broken_invariants(config, row, [], {})
    assert invariant.text.startswith("step 1: 50% of the groups")


def test_groups_of_equal_rewards_have_no_advantage() -> None:
    wrong = episodes(0.0, 0.0)
    advantages = (1.52, -1.18)
    texts = broken({}, group=wrong, advantages=advantages)
    assert texts["advantage"] == (
        "step 1: 1 of 1 groups have equal rewards and advantages up to 1.5, although "
        "advantage = 'grpo' gives them none"
    )
    shaped = broken(PENALTY, group=wrong, advantages=advantages)
    assert "by algorithm.reward = 'overlong' alone" in shaped["advantage"]
    # No advantage is known of what was left out.
    unknown = (math.nan, math.nan)
    assert broken({}, group=wrong, advantages=unknown) == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm.advantage": "score"},
        {"algorithm.advantage": "reinforce_pp"},
        # The batch's mean is taken off, too.
        {"algorithm.advantage": "reinforce_pp_baseline"},
        # Every token has a cost.
        {"algorithm.kl": {"coefficient": 0.1, "placement": "reward"}},
    ],
)
def test_estimators_that_compare_more_than_a_group_may_give_an_advantage(
    settings: dict[str, Any],
) -> None:
    wrong = episodes(0.0, 0.0)
    assert broken(settings, group=wrong, advantages=(0.3, -0.1)) == {}


def test_equal_sums_may_have_been_earned_in_other_turns() -> None:
    first, second = episodes(1.0, 1.0)
    early = np.array([1.0, 0.0, 0.0, 0.0], dtype=np.float32)
    late = np.array([0.0, 0.0, 0.0, 1.0], dtype=np.float32)
    of_turns = [
        dataclasses.replace(first, token_rewards=early),
        dataclasses.replace(second, token_rewards=late),
    ]
    return_to_go = {"algorithm.advantage": "return_to_go"}
    advantages = (0.5, -0.5)
    assert broken(return_to_go, group=of_turns, advantages=advantages) == {}
    without_turns = [first, second]
    assert "advantage" in broken(
        return_to_go, group=without_turns, advantages=advantages
    )
    # GRPO adds the rewards of turns up.
    assert "advantage" in broken({}, group=of_turns, advantages=advantages)


def test_settings_that_a_rule_refuses_would_be_seen_in_a_step() -> None:
    """As of a run with `sampling.top_p` 0.8 and weights, if nothing had refused it."""
    config = config_with(FLOAT32)
    cut = config.sampling.model_copy(update={"top_p": 0.8})
    tables = dict(config) | {"sampling": cut}
    refused = Config.model_construct(**tables)
    row = ROW | {
        "logprob_gap_mean": 0.21,
        "importance_weight_mean": 0.81,
    }
    invariants = broken_invariants(refused, row, [], {})
    assert {invariant.name for invariant in invariants} == {"gap", "weight"}
