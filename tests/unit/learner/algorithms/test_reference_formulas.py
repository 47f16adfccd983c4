"""Each row of the table of functions has a formula of docs/algorithms.md, written once more."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import JsonValue
from slipstream.core.settings.function_table import FUNCTIONS, FunctionKind
from slipstream.learner.algorithms.advantages import token_advantages
from slipstream.learner.algorithms.episodes import (
    FloatArray,
    RewardedEpisode,
    ScoredEpisode,
    Turn,
)
from slipstream.learner.algorithms.functions import filtered, rewarded
from support.fakes.packed import algorithm, loss_inputs, terms_of, weights_of
from support.references.plain_algorithm import (
    ADVANTAGES,
    FILTERS,
    FORMULAS,
    OBJECTIVES,
    REWARDS,
    PlainEpisode,
    weight_of,
)
from torch import Tensor

Arguments = dict[str, JsonValue]
HERE = Path(__file__)
PAGE = HERE.parents[4] / "docs" / "algorithms.md"
NOTHING = np.zeros(0, dtype=np.uint32)
ROWS: list[tuple[FunctionKind, str]] = []
for function_kind, table in FUNCTIONS.items():
    ROWS += [(function_kind, name) for name in table]
# Arguments that have no default, and others that change the numbers.
ARGUMENTS: dict[str, list[Arguments]] = {
    "ppo": [
        {},
        {"dual_clip": 1.5},
        {"clip_low": 0.01, "clip_high": 0.02},
    ],
    "return_to_go": [
        {},
        {"gamma": 0.5, "normalize": False},
        {"gamma": 0.0},
    ],
    "gae": [
        {},
        {"gamma": 0.9, "lam": 0.5, "normalize": False},
    ],
    "turn_gae": [
        {},
        {"gamma": 0.9, "lam": 0.5, "normalize": False},
    ],
    "token": [
        {},
        {"cap": 1.1},
        {"token_band": [0.8, 1.2], "sequence_band": [0.9, 1.5]},
    ],
    "sequence": [
        {},
        {"cap": 1.1, "token_band": [0.8, 1.2]},
    ],
    "split": [
        {},
        {"engine_cap": 1.05, "staleness_cap": 1.1},
        {"engine_token_band": [0.9, 1.2], "staleness_token_band": [0.8, 1.1]},
        {"engine_sequence_band": [0.5, 1.5], "staleness_sequence_band": [1.4, 1.5]},
    ],
    "overlong": [
        {"cache_tokens": 4},
        {"cache_tokens": 12, "penalty": 0.3},
    ],
}


def with_arguments(kind: FunctionKind) -> list[tuple[str, Arguments]]:
    pairs: list[tuple[str, Arguments]] = []
    for name in FUNCTIONS[kind]:
        choices = ARGUMENTS.get(name, [{}])
        pairs += [(name, arguments) for arguments in choices]
    return pairs


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_every_function_has_a_formula_a_row_of_the_page_and_a_test(
    kind: FunctionKind, name: str
) -> None:
    place = "tests/support/references/plain_algorithm.py"
    assert name in FORMULAS[kind], f"{place} lacks {kind} {name}"
    # Rewards and filters have sentences in place of rows.
    row = rf'`{name}`|`{kind} = "{name}"`'
    if kind not in ("reward", "filter"):
        row = rf"^(\[?{row})"
    page = PAGE.read_text()
    assert re.search(row, page, re.MULTILINE), f"{PAGE.name} lacks {kind} {name}"
    paths = set(HERE.parent.glob("test_*.py")) - {HERE}
    tests = "".join(path.read_text() for path in paths)
    assert re.search(rf"\b{name}\b", tests), f"no test of {kind} {name}"


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_no_formula_is_of_a_function_that_is_gone(kind: FunctionKind) -> None:
    assert FORMULAS[kind].keys() == FUNCTIONS[kind].keys()


def plain_episodes() -> list[PlainEpisode]:
    chance = np.random.default_rng(3)
    episodes: list[PlainEpisode] = []
    for number in range(6):
        size = 2 + number
        middle = 1 + number // 2
        earned: FloatArray | None = None
        reward = float(chance.normal())
        if number % 2:
            earned = chance.normal(0, 1, size)
            reward = float(earned.sum())
        episode = PlainEpisode(
            group=f"g{number // 3}",
            reward=reward,
            costs=chance.uniform(0, 0.1, size),
            values=chance.normal(0, 1, size),
            turns=((0, middle), (middle, size)),
            earned=earned,
        )
        episodes.append(episode)
    return episodes


def scored(plain: PlainEpisode, *, has_critic: bool) -> ScoredEpisode:
    """The same episode for the product, whose inputs become read-only."""
    turns: list[Turn] = []
    for start, stop in plain.turns:
        span = slice(start, stop)
        turns.append(Turn(span, NOTHING, NOTHING))
    values = plain.values.copy()
    earned = plain.earned
    return ScoredEpisode(
        group_id=plain.group,
        reward=plain.reward,
        token_costs=plain.costs.copy(),
        values=values if has_critic else None,
        earned=None if earned is None else earned.copy(),
        turns=tuple(turns),
    )


@pytest.mark.parametrize(("name", "arguments"), with_arguments("advantage"))
def test_advantages_are_those_of_their_formula(name: str, arguments: Arguments) -> None:
    plain = plain_episodes()
    # With values an estimator must give the critic's targets.
    has_critic = name in ("gae", "turn_gae")
    episodes = [scored(episode, has_critic=has_critic) for episode in plain]
    table: Arguments = {
        "advantage": name,
        "advantage_args": arguments,
    }
    if name == "none":
        table["kl"] = {"coefficient": 0.1}
    settings = algorithm(**table)
    results = token_advantages(settings, episodes, where="a test")
    formula = ADVANTAGES[name]
    expected = formula(plain, **settings.advantage_args)
    for result, numbers in zip(results, expected, strict=True):
        np.testing.assert_allclose(
            result.advantages,
            numbers,
            rtol=1e-9,
            atol=1e-12,
        )


TOKENS = 9


def normal(seed: int) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, generator=chance, dtype=torch.float64)


POLICY = -normal(1).abs() - 0.5
# The log-probabilities of a policy nearby.
NEARBY = POLICY + 0.3 * normal(2)
BETWEEN = POLICY + 0.2 * normal(4)


@pytest.mark.parametrize(("name", "arguments"), with_arguments("loss"))
def test_losses_and_their_gradients_are_those_of_their_formula(
    name: str, arguments: Arguments
) -> None:
    settings = algorithm(loss=name, loss_args=arguments)
    advantages = normal(3)
    policy = POLICY.clone().requires_grad_()
    tokens = loss_inputs(policy, NEARBY, advantages)
    losses = terms_of(settings, tokens).losses
    keywords = dict(settings.loss_args)
    keywords.pop("ratio", None)
    plain_policy = POLICY.clone().requires_grad_()
    log_ratio = plain_policy - NEARBY
    formula = OBJECTIVES[name]
    expected = formula(plain_policy, log_ratio, advantages, **keywords)
    torch.testing.assert_close(losses, expected)
    (gradient,) = torch.autograd.grad(losses.sum(), policy)
    (plain_gradient,) = torch.autograd.grad(expected.sum(), plain_policy)
    torch.testing.assert_close(gradient, plain_gradient)


@pytest.mark.parametrize(("name", "arguments"), with_arguments("weight"))
def test_weights_are_those_of_their_formula(name: str, arguments: Arguments) -> None:
    settings = algorithm(weight=name, weight_args=arguments)
    tokens = loss_inputs(POLICY, POLICY, behavior=NEARBY, versions=BETWEEN)
    weights = weights_of(settings, tokens).weights
    expected = weight_of(settings, NEARBY, BETWEEN, POLICY)
    torch.testing.assert_close(weights, expected)


def episode_of(reward: float, longest: int = 6) -> RewardedEpisode:
    return RewardedEpisode(
        reward=reward,
        metrics={},
        is_truncated=False,
        reply_tokens=(3, longest),
        max_reply_tokens=10,
        environment="e",
        task_index=0,
    )


@pytest.mark.parametrize(("name", "arguments"), with_arguments("reward"))
def test_rewards_are_those_of_their_formula(name: str, arguments: Arguments) -> None:
    settings = algorithm(reward=name, reward_args=arguments)
    formula = REWARDS[name]
    for longest in range(4, 11):
        episode = episode_of(1.0, longest)
        (result,) = rewarded(settings, [episode], where="a test")
        penalty = formula(longest, 10, **settings.reward_args)
        assert result.shaped_reward == pytest.approx(1.0 - penalty)


@pytest.mark.parametrize("name", FUNCTIONS["filter"])
@pytest.mark.parametrize("rewards", [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)])
def test_filters_are_those_of_their_formula(
    name: str, rewards: tuple[float, ...]
) -> None:
    settings = algorithm(filter=name)
    group = [episode_of(reward) for reward in rewards]
    is_trained = filtered(settings, group, where="a test")
    assert is_trained == FILTERS[name](rewards)
