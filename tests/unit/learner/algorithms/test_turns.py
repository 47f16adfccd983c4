"""Rewards of turns and tokens: the advantages that read them, and what they are worth."""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.learner.algorithms.advantages import (
    gae,
    grpo,
    reinforce_pp,
    return_to_go,
    turn_gae,
)
from slipstream.learner.algorithms.episodes import ScoredEpisode, Turn

from deploy.algorithms import gigpo

NUMBER = st.floats(-2, 2, width=32)


def episode(
    group: str, turns: list[list[float]], states: list[int], values=None
) -> ScoredEpisode:
    """An episode of one branch; `turns` has the reward of each token of each turn."""
    ends = np.cumsum([0, *map(len, turns)])
    spans = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    read = [np.array([state], dtype=np.uint32) for state in states]
    return ScoredEpisode(
        group,
        float(np.sum(np.concatenate(turns))),
        np.zeros(ends[-1]),
        None if values is None else np.array(values[: ends[-1]]),
        earned=np.concatenate(turns).astype(np.float64),
        turns=tuple(Turn(s, r, r) for s, r in zip(spans, read, strict=True)),
    )


@st.composite
def batches(draw):
    """Episodes of one or two groups, with one to four turns of one to three tokens each."""
    episodes_made = []
    for _ in range(draw(st.integers(1, 6))):
        turns = draw(
            st.lists(st.lists(NUMBER, min_size=1, max_size=3), min_size=1, max_size=4)
        )
        states = draw(
            st.lists(st.integers(0, 1), min_size=len(turns), max_size=len(turns))
        )
        values = draw(st.lists(NUMBER, min_size=12, max_size=12))
        episodes_made.append((draw(st.sampled_from("ab")), turns, states, values))
    return episodes_made


def scaled(values: dict, keys: dict, number: float = 1e-6) -> dict:
    """Each value less the mean of those with its key, over their deviation, in plain Python."""
    groups = defaultdict(list)
    for place, value in values.items():
        groups[keys[place]].append(value)
    advantages_by_turn = {}
    for place, value in values.items():
        group = groups[keys[place]]
        mean = sum(group) / len(group)
        deviation = (sum((other - mean) ** 2 for other in group) / len(group)) ** 0.5
        advantages_by_turn[place] = (value - mean, deviation + number)
    return advantages_by_turn


def plain_returns(turns: list[list[float]], gamma: float) -> list[list[float]]:
    """The return of each token of each turn by its definition: a sum over all later tokens."""
    return [
        [
            sum(turn[t:])
            + sum(gamma ** (k - n) * sum(turns[k]) for k in range(n + 1, len(turns)))
            for t in range(len(turn))
        ]
        for n, turn in enumerate(turns)
    ]


@given(batches(), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_return_to_go_is_that_of_its_definition(made, gamma, normalize):
    returns = [plain_returns(turns, gamma) for _, turns, _, _ in made]
    starts = {
        (e, n): turn_returns[0]
        for e, returns_of_episode in enumerate(returns)
        for n, turn_returns in enumerate(returns_of_episode)
    }
    facts = scaled(starts, {(e, n): (made[e][0], n) for e, n in starts})
    estimates = return_to_go(
        [episode(g, t, s) for g, t, s, _ in made], gamma=gamma, normalize=normalize
    )
    for e, of_turns in enumerate(returns):
        expected = []
        for n, turn in enumerate(of_turns):
            centred, deviation = facts[e, n]
            expected += [
                (g - turn[0] + centred) / (deviation if normalize else 1) for g in turn
            ]
        assert estimates[e] == pytest.approx(expected, rel=1e-6, abs=1e-5)


@given(batches(), st.sampled_from([0.0, 0.7, 1.0]))
def test_gae_over_turns_is_that_of_its_definition(made, lam):
    gamma = 0.9
    for has_values in (True, False):
        episodes = [episode(g, t, s, v if has_values else None) for g, t, s, v in made]
        found = turn_gae(episodes, gamma=gamma, lam=lam, normalize=False)
        for (_, turns, _, values), estimate in zip(made, found, strict=True):
            starts = np.cumsum([0, *map(len, turns)]).tolist()
            worth = [values[at] if has_values else 0.0 for at in starts[:-1]] + [0.0]
            deltas = [
                sum(t) + gamma * worth[n + 1] - worth[n] for n, t in enumerate(turns)
            ]
            estimates = [
                sum((gamma * lam) ** (k - n) * deltas[k] for k in range(n, len(turns)))
                for n in range(len(turns))
            ]
            expected = [
                a for a, turn in zip(estimates, turns, strict=True) for _ in turn
            ]
            assert estimate.advantages == pytest.approx(expected, abs=1e-9)
            assert (estimate.returns is None) is not has_values
            if estimate.returns is not None:
                targets = [a + w for a, w in zip(estimates, worth, strict=False)]
                token_targets = [
                    r for r, turn in zip(targets, turns, strict=True) for _ in turn
                ]
                assert estimate.returns == pytest.approx(token_targets, abs=1e-9)


@given(batches(), st.booleans())
def test_gigpo_is_the_papers_sum_of_two_comparisons(made, by_deviation):
    """Eq. 3 (episodes), 7 (anchor states) and 8 (their sum) of arXiv:2505.10978."""
    gamma = 0.95
    omega = 0.5
    totals = {
        e: float(np.sum(np.concatenate(turns)))
        for e, (_, turns, _, _) in enumerate(made)
    }
    of_episodes = scaled(
        totals, {e: totals_of_episode[0] for e, totals_of_episode in enumerate(made)}
    )
    returns = {
        (e, n): turn_return[0]
        for e, (_, turns, _, _) in enumerate(made)
        for n, turn_return in enumerate(plain_returns(turns, gamma))
    }
    of_steps = scaled(
        returns, {(e, n): (made[e][0], made[e][2][n]) for e, n in returns}
    )
    episodes = [episode(g, t, s) for g, t, s, _ in made]
    advantages = gigpo.advantage(
        episodes, omega=omega, gamma=gamma, by_deviation=by_deviation
    )
    for e, (_, turns, _, _) in enumerate(made):
        expected: list[float] = []
        for n, turn in enumerate(turns):
            parts = [
                c / (d if by_deviation else 1)
                for c, d in (of_episodes[e], of_steps[e, n])
            ]
            expected += [parts[0] + omega * parts[1]] * len(turn)
        assert advantages[e] == pytest.approx(expected, rel=1e-6, abs=1e-5)


def test_a_reward_at_the_end_has_the_bits_of_a_single_number() -> None:
    """Also with costs: what an episode earned in its last token is its reward alone."""
    chance = np.random.default_rng(0)
    single = []
    spread = []
    for n in range(12):
        size = int(chance.integers(2, 9))
        reward = float(chance.normal())
        costs = chance.uniform(0, 0.1, size)
        values = chance.normal(size=size)
        earned = np.zeros(size)
        earned[-1] = reward
        turns = (Turn(slice(0, 1), *2 * [np.zeros(1, np.uint32)]),)
        turns += (Turn(slice(1, size), *2 * [np.zeros(1, np.uint32)]),)
        branches = (slice(0, 1), slice(1, size)) if n % 2 else (slice(0, size),)
        episode = ScoredEpisode(f"g{n // 4}", reward, costs, values, branches)
        single.append(episode)
        spread.append(dataclasses.replace(episode, earned=earned, turns=turns))
    for function in (grpo, reinforce_pp):
        pairs = zip(function(single), function(spread), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
    for episode, other in zip(gae(single), gae(spread), strict=True):
        assert np.array_equal(episode.advantages, other.advantages)
        assert np.array_equal(episode.returns, other.returns)


def test_what_a_later_branch_earned_follows_an_earlier_one() -> None:
    tree = ScoredEpisode(
        "a",
        6.0,
        np.zeros(4),
        branches=(slice(0, 2), slice(2, 4)),
        earned=np.array([0.0, 1.0, 2.0, 3.0]),
    )
    assert tree.token_rewards().tolist() == [0.0, 6.0, 2.0, 3.0]
    assert tree.returns().tolist() == [6.0, 6.0, 5.0, 3.0]
    tree_of_one_reward = dataclasses.replace(tree, earned=None)
    assert tree_of_one_reward.token_rewards().tolist() == [0.0, 6.0, 0.0, 6.0]
