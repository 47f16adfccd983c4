"""The search for the group at fault, with metrics that need no model."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from slipstream.core.recorded_metrics import MetricCondition
from slipstream.learner.trainer.group_search import Culprit, GroupSearch, Inconclusive

Parts = npt.NDArray[np.float64]


def search_among(
    parts: Parts,
    bound: float,
    metric: Callable[[Parts], float] = np.mean,
    *,
    least: int = 1,
) -> GroupSearch:
    """A search for the part that lifts `metric` above `bound`, in one batch.

    At least `least` parts remain in each trial.
    """

    def train(left_out: Sequence[int]) -> float:
        remaining = np.delete(parts, list(left_out), axis=0)
        return float(metric(remaining))

    def may_leave_out(places: Sequence[int]) -> bool:
        return len(parts) - len(places) >= least

    return GroupSearch(
        condition=MetricCondition("m", ">", bound),
        batches=[1] * len(parts),
        train=train,
        may_leave_out=may_leave_out,
    )


def norm_of_mean(gradients: Parts) -> float:
    return float(np.linalg.norm(gradients.mean(axis=0)))


def planted(case: int) -> tuple[GroupSearch, int]:
    """A search among 1,000 groups of which one is poisoned, and its place."""
    random = np.random.default_rng(case)
    place = int(random.integers(1000))
    if case % 2:
        losses = random.normal(0.0, 1.0, 1000)
        losses[place] = 4000.0
        return search_among(losses, 3.0), place
    gradients = random.normal(0.0, 1.0, (1000, 20))
    gradients[place] *= 2000.0
    return search_among(gradients, 3.0, norm_of_mean), place


@pytest.mark.parametrize("case", range(10))
def test_a_poisoned_group_among_a_thousand_is_found_in_twelve_trainings(
    case: int,
) -> None:
    search, place = planted(case)
    culprit = search.culprit()
    assert culprit.place == place
    assert culprit.stands_out
    assert len(search.trials) <= 12


@pytest.mark.parametrize("case", range(10))
def test_none_stands_out_where_the_bound_is_within_reach_of_any_group(
    case: int,
) -> None:
    random = np.random.default_rng(100 + case)
    parts = random.normal(0.0, 1.0, 1000)
    mean = float(parts.mean())
    largest_share = float(parts.max() - mean) / 999
    search = search_among(parts, mean - 0.2 * largest_share)
    try:
        culprit = search.culprit()
    except Inconclusive as reason:
        assert "does not heal it" in str(reason)
    else:
        assert not culprit.stands_out


def test_the_largest_of_all_parts_is_found_in_a_metric_that_takes_the_largest() -> None:
    parts = np.arange(16.0)
    parts[5] = 100.0
    culprit = search_among(parts, 50.0, np.max).culprit()
    assert culprit.place == 5
    assert culprit.value == 15.0
    assert culprit.stands_out


@pytest.mark.parametrize("case", range(10))
def test_the_largest_of_many_alike_does_not_stand_out(case: int) -> None:
    random = np.random.default_rng(case)
    parts = np.exp(0.3 * random.normal(0.0, 1.0, 1000))
    search = search_among(parts, float(parts.max()) * (1 - 1e-6), np.max)
    culprit = search.culprit()
    assert culprit.place == parts.argmax()
    assert not culprit.stands_out


def test_two_poisoned_groups_are_not_taken_for_one() -> None:
    parts = np.zeros(16)
    parts[3] = 100.0
    parts[12] = 100.0
    search = search_among(parts, 3.0)
    with pytest.raises(Inconclusive, match="several are at fault together"):
        search.culprit()


def test_a_condition_that_does_not_hold_again_ends_the_search_at_once() -> None:
    search = search_among(np.zeros(16), 3.0)
    with pytest.raises(
        Inconclusive, match="with all groups, m is 0: the condition does not hold"
    ):
        search.culprit()
    assert len(search.trials) == 1


def test_no_trial_leaves_a_step_fewer_groups_than_it_has_mini_batches() -> None:
    parts = np.zeros(16)
    parts[15] = 100.0
    search = search_among(parts, 3.0, least=12)
    assert search.culprit().place == 15
    assert all(len(trial.left_out) <= 4 for trial in search.trials)


def test_suspects_none_of_which_may_be_left_out_are_not_divided() -> None:
    parts = np.zeros(16)
    parts[15] = 100.0
    search = search_among(parts, 3.0, least=16)
    with pytest.raises(Inconclusive, match="fewer groups than mini-batches"):
        search.culprit()


@pytest.mark.parametrize(
    ("prominence", "num_trials", "stands_out"),
    [
        # By the definition 8 * (1 + 16 / n^2): 40 for two trials, 13.12 for five.
        (39.0, 2, False),
        (41.0, 2, True),
        (13.0, 5, False),
        (13.2, 5, True),
        (math.nan, 0, False),
    ],
)
def test_few_trials_need_a_more_prominent_culprit(
    prominence: float,
    num_trials: int,
    stands_out: bool,
) -> None:
    culprit = Culprit(
        place=0,
        value=0.0,
        prominence=prominence,
        num_trials=num_trials,
    )
    assert culprit.stands_out is stands_out


def test_a_culprit_among_equal_others_is_infinitely_prominent() -> None:
    # The mean is 3.75 with the fifth part and 0 without it. Left out are the first four (mean
    # 7.5 = 0 + 3.75 * 8 / 4), then the fifth and sixth (0), then the fifth.
    parts = np.array([-1.0, 1.0, -2.0, 2.0, 30.0, 0.0, 1.0, -1.0])
    search = search_among(parts, 3.0)
    culprit = search.culprit()
    trials = [list(trial.left_out) for trial in search.trials]
    assert trials == [[], [0, 1, 2, 3], [4, 5], [4]]
    assert culprit.place == 4
    assert culprit.value == 0.0
    assert culprit.prominence == math.inf


def test_the_part_of_a_culprit_is_counted_in_spreads_of_the_others() -> None:
    parts = np.array([-1.7, 1.0, -2.0, 2.0, 30.0, 0.0, 1.0, -1.0])
    # The sum is 29.3 with the fifth part and -0.7 without it, so the mean is 3.6625 and -0.1.
    excess = 3.6625 + 0.1
    # Without the first four the mean is 30 / 4, where -0.1 + excess * 8 / 4 is expected.
    first_deviation = 7.5 - (-0.1 + 2 * excess)
    # Without the fifth and sixth it is -0.7 / 6, where -0.1 is expected.
    second_deviation = -0.7 / 6 + 0.1
    first_scaled = first_deviation * math.sqrt(8 * 4 / 4)
    second_scaled = second_deviation * math.sqrt(8 * 6 / 1)
    spread = math.hypot(first_scaled, second_scaled) / math.sqrt(2)

    culprit = search_among(parts, 3.0).culprit()
    assert culprit.num_trials == 2
    assert culprit.prominence == pytest.approx(8 * excess / spread, rel=1e-9)
