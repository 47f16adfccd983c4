"""What is told of runs that learn nothing, each for another planted reason, and of runs that do."""

import math
import random
import re
from collections.abc import Callable, Iterator

import pytest
from slipstream.core.settings.config import Config
from slipstream.learner.controller.reporting.learning import (
    PAGE,
    EvaluationPoint,
    LearningWatch,
    is_overfit,
)
from support.fakes.small_configs import config_with

STEPS = 20
LIMIT = 100
SETTINGS = {"sampling.max_reply_tokens": LIMIT, "sampling.max_episode_tokens": 200}
DYNAMIC = SETTINGS | {"algorithm.filter": "unequal_rewards"}
Row = dict[str, float]
Change = Callable[[int], Row]


def row_of(step: int, **values: float) -> Row:
    """The row of a step that is as it should be."""
    row = {
        "step": float(step),
        "reward_mean": 0.3,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "equal_rewards_fraction": 0.2,
        "filtered_groups": 0.0,
        "entropy": 1.5,
        "grad_norm": 0.4,
        "learning_rate": 1e-6,
        "truncated_fraction": 0.02,
        "importance_capped_fraction": 0.01,
        "effective_sample_size": 0.95,
        "reply_tokens_mean": 40.0,
    }
    return row | values


def texts_of(rows: Iterator[Row], config: Config | None = None) -> dict[str, str]:
    """The first text of each notice, by its name."""
    watch = LearningWatch(config or config_with(SETTINGS))
    texts: dict[str, str] = {}
    for row in rows:
        for notice in watch.take(row):
            texts.setdefault(notice.name, notice.text)
    return texts


def unlearnt(change: Change) -> Iterator[Row]:
    """A run whose reward stays where it is, in which something is wrong."""
    for step in range(1, STEPS + 1):
        yield row_of(step, **change(step))


def evaluated(step: int, reward: float) -> Row:
    return {
        "evaluation_step": float(step),
        "held/reward_mean": reward,
        "held/reward_std": 0.4,
        "held/num_episodes": 400.0,
    }


def overfit_run() -> Iterator[Row]:
    for step in range(1, STEPS + 1):
        yield row_of(step, reward_mean=0.3 + 0.02 * step)
        if step % 4 == 0:
            yield evaluated(step, 0.5 - 0.02 * step)


PLANTED: dict[str, tuple[Change, str]] = {
    "no reply earns anything": (
        lambda step: {
            "reward_mean": 0.0,
            "reward_max": 0.0,
            "equal_rewards_fraction": 1.0,
            "grad_norm": 1e-9,
        },
        "100% of the groups have had equal rewards for 10 steps for want of reward, 0 on average",
    ),
    "hardly a reply earns anything": (
        lambda step: {"reward_mean": 0.01, "equal_rewards_fraction": 0.9},
        "90% of the groups .* for want of reward, 0.01 on average: they teach nothing",
    ),
    "all tasks are solved": (
        lambda step: {"reward_mean": 0.99, "equal_rewards_fraction": 0.9},
        "90% of the groups .* nearly all replies earn the most, 0.99 on average",
    ),
    "the judge pays everything": (
        lambda step: {
            "reward_mean": 1.0,
            "reward_min": 1.0,
            "equal_rewards_fraction": 1.0,
        },
        "nearly all replies earn the most, 1 on average",
    ),
    "the judge pays one value": (
        lambda step: {
            "reward_mean": 0.5,
            "reward_min": 0.5,
            "reward_max": 0.5,
            "equal_rewards_fraction": 1.0,
        },
        "for want of reward, 0.5 on average",
    ),
    "nothing has a gradient": (
        lambda step: {"grad_norm": 0.0},
        "step 3: the gradient has been 0 for 3 steps: the weights stay as they are",
    ),
    "the learning rate is 0": (
        lambda step: {"learning_rate": 0.0},
        "step 3: the learning rate has been 0 for 3 steps",
    ),
    "the policy has collapsed": (
        lambda step: {"entropy": 1.5 * math.exp(-0.5 * step)},
        "entropy has fallen from 0.424 to 0.0348 and the reward does not rise",
    ),
    "replies are cut": (
        lambda step: {"truncated_fraction": 0.6},
        "60% of the episodes were cut at a limit for 10 steps .* raise sampling.max_reply_tokens",
    ),
    "weights are capped": (
        lambda step: {"importance_capped_fraction": 0.3},
        "weights of 30% of the tokens were capped .* lower algorithm.max_staleness",
    ),
    "weights are worth few tokens": (
        lambda step: {"effective_sample_size": 0.2},
        "the tokens of the last 10 steps are worth 20% of their number",
    ),
    "length earns by itself": (
        lambda step: {"reply_tokens_mean": min(LIMIT, 30.0 + 10 * step)},
        "replies have grown from 60 to 99 tokens, up to sampling.max_reply_tokens = 100",
    ),
    "silence earns as much": (
        lambda step: {
            "reply_tokens_mean": max(1.0, 40.0 - 8 * step),
            "reward_mean": min(0.5, 0.1 * step),
        },
        "replies have shrunk from 16 to 1.0 tokens: saying nothing earns as much",
    ),
}


@pytest.mark.parametrize("reason", PLANTED)
def test_why_nothing_is_learnt_is_told_within_twenty_steps(reason: str) -> None:
    change, text = PLANTED[reason]
    (notice,) = texts_of(unlearnt(change)).values()
    assert re.search(text, notice)
    assert notice.endswith(f"({PAGE})")


def test_an_evaluation_that_falls_while_training_rises_is_told() -> None:
    texts = texts_of(overfit_run())
    assert list(texts) == ["evaluation held"]
    assert texts["evaluation held"].startswith(
        "evaluation held has fallen from 0.42 at version 4 to 0.18 at version 16 while the reward "
        "of training has risen from 0.35 to 0.58"
    )


def test_groups_that_the_filter_leaves_out_are_texts_of() -> None:
    rows = unlearnt(
        lambda step: {"equal_rewards_fraction": 0.0, "filtered_groups": 30.0}
    )
    (text,) = texts_of(rows, config_with(DYNAMIC)).values()
    assert re.search(
        "algorithm.filter has left out 9[0-9]% of the groups for 10 steps", text
    )


def test_one_environment_of_two_is_told_by_its_name() -> None:
    def change(step: int) -> Row:
        return {
            "hard/equal_rewards_fraction": 1.0,
            "hard/reward": 0.0,
            "easy/equal_rewards_fraction": 0.1,
            "easy/reward": 0.6,
        }

    (text,) = texts_of(unlearnt(change)).values()
    assert re.search(
        "100% of the groups of hard have had equal rewards .* for want of reward", text
    )


@pytest.mark.parametrize("estimator", ["reinforce_pp", "score"])
def test_equal_rewards_of_a_group_are_nothing_where_groups_are_not_compared(
    estimator,
) -> None:
    rows = unlearnt(lambda step: {"equal_rewards_fraction": 1.0, "reward_mean": 1.0})
    settings = SETTINGS | {"algorithm.advantage": estimator}
    assert texts_of(rows, config_with(settings)) == {}


def learning_run(seed: int) -> Iterator[Row]:
    """A run that learns at its own speed, from its own start to its own end, with noise.

    Its replies are cut at first, its entropy falls as it learns, and its length drifts.
    """
    draw = random.Random(seed)
    start = draw.uniform(0.02, 0.3)
    end = draw.uniform(0.6, 1.0)
    speed = draw.uniform(0.08, 0.3)
    final_entropy = draw.uniform(0.02, 0.5)
    drift = draw.uniform(-0.3, 0.4)
    cut = draw.choice([0.0, 0.05, 1.0])
    for step in range(1, 121):
        progress = 1.0 - math.exp(-speed * step / 3)
        reward = start + (end - start) * progress + draw.gauss(0.0, 0.015)
        heldout = reward + draw.gauss(0.0, 0.02)
        yield row_of(
            step,
            reward_mean=min(1.0, max(0.0, reward)),
            equal_rewards_fraction=min(0.7, 0.1 + 0.6 * progress * draw.random()),
            entropy=1.5 * (1 - progress) + final_entropy * progress,
            grad_norm=draw.uniform(0.05, 1.0),
            truncated_fraction=cut,
            reply_tokens_mean=40.0 * (1 + drift * progress),
            importance_capped_fraction=draw.uniform(0.0, 0.04),
            effective_sample_size=draw.uniform(0.8, 1.0),
        )
        if step % 25 == 0:
            yield evaluated(step, heldout)


@pytest.mark.parametrize("seed", range(12))
def test_a_run_that_learns_is_told_nothing(seed: int) -> None:
    assert texts_of(learning_run(seed)) == {}


def test_a_run_that_has_solved_its_tasks_is_told_so_without_a_warning() -> None:
    watch = LearningWatch(config_with(SETTINGS))
    notices = []
    for step in range(1, 60):
        reward = min(0.99, 0.05 * step)
        equal = 0.9 if reward > 0.9 else 0.1
        row = row_of(step, reward_mean=reward, equal_rewards_fraction=equal)
        notices.extend(watch.take(row))
    names = {notice.name for notice in notices}
    assert names == {"solved "}
    assert not any(notice.is_warning for notice in notices)


def test_two_rounds_below_the_best_are_needed_and_more_than_chance() -> None:
    best = EvaluationPoint(10, 0.6, 0.02, 0.5)
    chance = EvaluationPoint(20, 0.55, 0.02, 0.6)
    worse = EvaluationPoint(30, 0.4, 0.02, 0.7)
    assert is_overfit([best, worse, worse])
    assert not is_overfit([best, worse])
    assert not is_overfit([best, chance, worse])
    # The reward of training fell, too.
    unlucky = EvaluationPoint(30, 0.4, 0.02, 0.4)
    assert not is_overfit([best, worse, unlucky])


def test_a_row_that_a_client_ordered_is_passed_over() -> None:
    rows = ({"step": float(step), "grad_norm": 0.0} for step in range(1, STEPS))
    assert texts_of(rows) == {}


def test_steps_that_train_a_critic_alone_show_nothing() -> None:
    critic = {"algorithm.advantage": "gae", "critic.learning_rate": 1e-5}
    config = config_with(SETTINGS | critic | {"critic.warmup_steps": 8})

    def rows(num_warmup_steps: int) -> Iterator[Row]:
        for step in range(1, STEPS + 1):
            rate = 0.0 if step <= num_warmup_steps else 1e-6
            yield row_of(step, learning_rate=rate, reward_mean=0.02 * step)

    assert texts_of(rows(8), config) == {}
    assert "learning_rate" in texts_of(rows(STEPS), config)


def gap_rows(gap: Callable[[int], float], tokens: float = 400.0) -> Iterator[Row]:
    """A run with tokens of the newest weights, and the gap of each step."""
    for step in range(1, STEPS + 1):
        row = row_of(step, logprob_gap_mean=gap(step), logprob_gap_tokens=tokens)
        yield row | {"reward_mean": 0.2 + 0.03 * step}


def test_a_gap_of_engine_and_learner_that_grows_is_told() -> None:
    """Measured with prefixes of old weights in the engine's cache: 0.026 to 0.12 in 80 steps."""
    config = config_with(SETTINGS | {"model.dtype": "bfloat16"})
    texts = texts_of(gap_rows(lambda step: 0.025 * 1.12**step), config)
    assert texts.keys() == {"gap grows"}
    assert "from 0.044 to 0.14" in texts["gap grows"]


@pytest.mark.parametrize(
    ("gap", "tokens"),
    [
        # Twice as much, and many times as much of next to nothing.
        (lambda step: 0.04 * (1 + step / STEPS), 400.0),
        (lambda step: 1e-4 * 1.2**step, 400.0),
        # One step alone.
        (lambda step: 0.5 if step == 12 else 0.03, 400.0),
        # Of a few tokens, and of none.
        (lambda step: 0.02 * 1.2**step, 8.0),
        (lambda step: math.nan, 0.0),
    ],
)
def test_gaps_that_say_little_are_not_told(
    gap: Callable[[int], float], tokens: float
) -> None:
    config = config_with(SETTINGS | {"model.dtype": "bfloat16"})
    assert texts_of(gap_rows(gap, tokens), config) == {}


def test_a_gap_that_settings_explain_is_not_told() -> None:
    config = config_with(
        SETTINGS
        | {"model.dtype": "bfloat16", "rollout_server.recompute_context": False}
    )
    assert texts_of(gap_rows(lambda step: 0.025 * 1.12**step), config) == {}
