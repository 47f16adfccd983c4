"""Conditions on recorded metrics, and the steps in which they hold."""

from pathlib import Path

import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.recorded_metrics import MetricCondition, recorded_metrics, step_of

STEPS = {1: {"loss": 0.5}, 2: {"loss": 4.0}, 3: {"loss": 5.0, "kl": 0.1}}


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("loss > 3", 3.0, False),
        ("loss >= 3", 3.0, True),
        ("kl<1e-3", 5e-4, True),
        (" kl <= -1 ", 0.0, False),
    ],
)
def test_a_condition_compares_as_it_is_written(
    text: str, value: float, holds: bool
) -> None:
    condition = MetricCondition.parse(text)
    assert condition.holds(value) is holds
    assert MetricCondition.parse(str(condition)) == condition


@pytest.mark.parametrize(
    "text", ["loss", "loss > x", "> 3", "loss > nan", "loss == 3", "a b > 3"]
)
def test_another_text_is_no_condition(text: str) -> None:
    with pytest.raises(ConfigError, match="--metric must be a metric's name"):
        MetricCondition.parse(text)


def test_a_time_is_no_metric_to_repeat() -> None:
    with pytest.raises(ConfigError, match="seconds and bytes are of the machine"):
        MetricCondition.parse("training_s > 3")


def test_the_first_step_in_which_a_condition_holds_is_chosen() -> None:
    condition = MetricCondition.parse("loss > 3")
    assert step_of(condition, STEPS, step=None) == 2
    assert step_of(condition, STEPS, step=3) == 3


@pytest.mark.parametrize(
    ("text", "step", "cause"),
    [
        ("loss > 9", None, "holds in none of 3 recorded steps, whose loss is 0.5 to 5"),
        (
            "lossy > 9",
            None,
            "no recorded step has the metric 'lossy'; did you mean 'loss'?",
        ),
        ("loss > 3", 1, "loss of step 1 is 0.5, not loss > 3.0"),
        ("kl > 0", 1, "step 1 has no recorded kl"),
        ("kl > 0", 9, "step 9 has no recorded kl"),
    ],
)
def test_a_step_that_does_not_break_the_bound_is_refused(
    text: str, step: int | None, cause: str
) -> None:
    with pytest.raises(ConfigError, match=cause):
        step_of(MetricCondition.parse(text), STEPS, step=step)


def test_rows_of_evaluations_and_broken_lines_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 0.5, "kl": null, "is_last": true, "kl_max": Infinity}\n'
        '{"step": 1, "echo/reward_mean": 0.25}\n'
        '[1]\n{"loss": 1}\n{"step": 2, "lo'
    )
    assert recorded_metrics(tmp_path) == {1: {"step": 1.0, "loss": 0.5}}
    assert recorded_metrics(tmp_path / "nowhere") == {}
