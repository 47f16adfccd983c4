"""What the table of estimators says of each is what its function does, and what pages say."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from slipstream.core.errors import RunFailed
from slipstream.core.settings.function_table import ADVANTAGES
from slipstream.learner.algorithms.advantages import token_advantages
from slipstream.learner.algorithms.episodes import FloatArray, ScoredEpisode, Turn
from support.fakes.packed import algorithm

DOCS = Path(__file__).parents[4] / "docs"
NUM_TOKENS = 4
NO_TOKENS = np.zeros(0, dtype=np.uint32)
FIRST_TURN = Turn(
    span=slice(0, 2),
    context=NO_TOKENS,
    reply=NO_TOKENS,
)
LAST_TURN = Turn(
    span=slice(2, 4),
    context=NO_TOKENS,
    reply=NO_TOKENS,
)
# A row of metrics.md, and a sentence of algorithms.md.
COMPARED = re.compile(r"equal have advantages of 0 \| ([^;|]*);")
EARNED = re.compile(r"^([^.]*?) take rewards \[where they were earned\]", re.MULTILINE)


def episode(group: str, reward: float, *, earned_first: float = 0.0) -> ScoredEpisode:
    """An episode of two turns, whose first turn earned `earned_first` of its reward."""
    return ScoredEpisode(
        group_id=group,
        reward=reward,
        token_costs=np.zeros(NUM_TOKENS),
        values=np.array([0.3, 0.1, 0.4, 0.2]),
        earned=np.array([0.0, earned_first, 0.0, reward - earned_first]),
        turns=(FIRST_TURN, LAST_TURN),
    )


def without_values(episodes: Sequence[ScoredEpisode]) -> list[ScoredEpisode]:
    return [replace(member, values=None) for member in episodes]


def advantages(estimator: str, episodes: Sequence[ScoredEpisode]) -> list[FloatArray]:
    """The advantages of episodes, with a critic's values where the estimator has a use for them."""
    if ADVANTAGES[estimator].critic == "unused":
        episodes = without_values(episodes)
    return results(estimator, episodes)


def results(estimator: str, episodes: Sequence[ScoredEpisode]) -> list[FloatArray]:
    divergence = {"coefficient": 1.0} if estimator == "none" else {}
    settings = algorithm(advantage=estimator, kl=divergence)
    estimates = token_advantages(settings, episodes, where="here")
    return [estimate.advantages for estimate in estimates]


def are_equal(first: Sequence[FloatArray], other: Sequence[FloatArray]) -> bool:
    left = np.concatenate(first)
    right = np.concatenate(other)
    return np.allclose(left, right)


def is_zero(values: Sequence[FloatArray]) -> bool:
    return not any(array.any() for array in values)


PAIRS = [
    episode("a", 1.0),
    episode("a", 2.0),
    episode("b", 3.0),
    episode("b", 7.0),
]


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_an_estimator_that_compares_groups_gives_single_episodes_nothing(
    estimator: str,
) -> None:
    singles = [
        episode("a", 1.0),
        episode("b", 2.0),
        episode("c", 5.0),
    ]
    of_singles = advantages(estimator, singles)
    of_pairs = advantages(estimator, PAIRS)
    compares = is_zero(of_singles) and not is_zero(of_pairs)
    row = ADVANTAGES[estimator]
    assert row.compares_group == compares


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_an_estimator_that_compares_the_batch_depends_on_other_groups(
    estimator: str,
) -> None:
    before = advantages(estimator, PAIRS)
    other_rewards = [
        *PAIRS[:2],
        episode("b", 30.0),
        episode("b", -70.0),
    ]
    after = advantages(estimator, other_rewards)
    is_moved = not are_equal(before[:2], after[:2])
    row = ADVANTAGES[estimator]
    assert row.compares_batch == is_moved


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_an_estimator_that_sums_turns_does_not_ask_which_turn_earned(
    estimator: str,
) -> None:
    early = [
        episode("a", 1.0, earned_first=0.5),
        episode("a", 2.0, earned_first=1.5),
        episode("b", 3.0, earned_first=2.5),
        episode("b", 7.0, earned_first=3.5),
    ]
    of_late = advantages(estimator, PAIRS)
    of_early = advantages(estimator, early)
    sums = are_equal(of_late, of_early) and not is_zero(of_late)
    row = ADVANTAGES[estimator]
    assert row.sums_turns == sums


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_an_estimator_has_the_use_for_a_critic_that_its_row_says(
    estimator: str,
) -> None:
    use = "optional"
    try:
        results(estimator, PAIRS)
    except RunFailed:
        use = "unused"
    try:
        results(estimator, without_values(PAIRS))
    except RunFailed as error:
        assert "needs values of a critic" in str(error)
        use = "needed"
    assert ADVANTAGES[estimator].critic == use


def named(page: str, pattern: re.Pattern[str]) -> set[str]:
    """The estimators in the place of a page that a pattern finds."""
    text = (DOCS / page).read_text()
    match = pattern.search(text)
    assert match is not None, f"{page} has no such place any more"
    return set(re.findall(r"`(\w+)`", match[1]))


def test_the_page_of_metrics_names_all_estimators_that_compare_only_groups() -> None:
    names = {name for name, row in ADVANTAGES.items() if row.compares_only_groups}
    assert named("metrics.md", COMPARED) == names


def test_the_page_of_algorithms_names_all_estimators_that_read_rewards_of_turns() -> (
    None
):
    names = {name for name, row in ADVANTAGES.items() if not row.sums_turns} - {"none"}
    assert named("algorithms.md", EARNED) == names
