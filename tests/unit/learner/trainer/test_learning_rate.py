import pytest
from slipstream.core.errors import ConfigError
from slipstream.learner.trainer.step import learning_rate
from support.fakes.small_configs import small_config


def config_with(warmup_steps, decay=None, **tables):
    algorithm = {"learning_rate": 0.4, "warmup_steps": warmup_steps, **(decay or {})}
    algorithm["advantage"] = "gae" if tables else "grpo"
    return small_config(algorithm=algorithm, **tables)


LINEAR, SQRT, COSINE = ({"decay": kind} for kind in ("linear", "sqrt", "cosine"))


@pytest.mark.parametrize(
    ("warmup", "decay", "first", "expected"),
    [
        (0, {}, 0, [4] * 100),
        (4, {}, 0, [1, 2, 3, 4, 4, 4]),
        (4, LINEAR, 0, [1, 2, 3, 4, 4, 10 / 3, 8 / 3, 2, 4 / 3, 2 / 3]),
        (6, SQRT, 6, [4, 2, 4 - 8**0.5, 4 - 12**0.5]),
        (6, COSINE, 6, [4, 2 + 2**0.5, 2, 2 - 2**0.5]),
        # After the end of the decay it stays.
        (0, COSINE, 10, [0] * 90),
    ],
)
def test_learning_rate_rises_over_the_warmup_and_falls_until_the_end(
    warmup, decay, first, expected
):
    config = config_with(warmup, decay)
    rates = [
        10 * learning_rate(config, step) for step in range(first, first + len(expected))
    ]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("warmup", "decay", "alone", "expected"),
    [(2, {}, 3, [0, 0, 0, 2, 4, 4]), (0, LINEAR, 6, [0, 0, 0, 0, 0, 0, 4, 3, 2, 1])],
)
def test_the_policy_begins_when_the_critic_has_learnt_alone(
    warmup, decay, alone, expected
):
    config = config_with(
        warmup, decay, critic={"learning_rate": 1.0, "warmup_steps": alone}
    )
    rates = [10 * learning_rate(config, step) for step in range(len(expected))]
    assert rates == pytest.approx(expected)


def test_a_decay_without_a_step_for_it_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="must leave a step for algorithm.decay, got 10 of 10"
    ):
        config_with(10, LINEAR)
