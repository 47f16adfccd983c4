import pytest
from pydantic import JsonValue
from slipstream.core.errors import ConfigError
from slipstream.learner.trainer.step import learning_rate
from support.fakes.small_configs import small_config


def config_with(warmup_steps, decay=None, **tables):
    algorithm = {"learning_rate": 0.4, "warmup_steps": warmup_steps, **(decay or {})}
    algorithm["advantage"] = "gae" if tables else "grpo"
    return small_config(algorithm=algorithm, **tables)


def test_learning_rate_is_constant_without_warmup() -> None:
    config = config_with(0)
    assert [learning_rate(config, step) for step in (0, 1, 99)] == [0.4, 0.4, 0.4]


def test_learning_rate_rises_evenly_over_the_warmup_and_stays() -> None:
    config = config_with(4)
    found = [learning_rate(config, step) for step in range(6)]
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_the_policys_warmup_begins_when_the_critics_is_over() -> None:
    config = config_with(2, critic={"learning_rate": 1.0, "warmup_steps": 3})
    found = [learning_rate(config, step) for step in range(6)]
    assert found == pytest.approx([0.0, 0.0, 0.0, 0.2, 0.4, 0.4])


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ({"decay": "linear"}, [1, 2, 3, 4, 4, 10 / 3, 8 / 3, 2, 4 / 3, 2 / 3]),
        ({"decay": "linear", "decay_steps": 2}, [1, 2, 3, 4, 4, 4, 4, 4, 4, 2]),
        (
            {"decay": "linear", "decay_steps": 4, "decay_to": 0.5},
            [*(1, 2, 3), *(4,) * 4, 3.5, 3, 2.5],
        ),
        ({"decay": "sqrt", "decay_steps": 4}, [*(1, 2, 3), *(4,) * 4, 2, 4 - 8**0.5, 4 - 12**0.5]),
        ({"decay": "cosine", "decay_steps": 4}, [*(1, 2, 3), *(4,) * 4, 2 + 2**0.5, 2, 2 - 2**0.5]),
    ],
)
def test_learning_rate_falls_in_the_last_steps(decay, expected):
    config = config_with(4, decay)
    found = [10 * learning_rate(config, step) for step in range(10)]
    assert found == pytest.approx(expected)


def test_after_the_end_of_the_decay_the_learning_rate_stays() -> None:
    config = config_with(0, {"decay": "cosine", "decay_to": 0.1})
    assert [learning_rate(config, step) for step in (10, 99)] == pytest.approx([0.04, 0.04])


def test_the_decay_ends_with_the_run_however_long_the_critic_learns_alone() -> None:
    critic: JsonValue = {"learning_rate": 1.0, "warmup_steps": 6}
    config = config_with(0, {"decay": "linear"}, critic=critic)
    found = [learning_rate(config, step) for step in range(4, 10)]
    assert found == pytest.approx([0.0, 0.0, 0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    ("warmup", "decay", "said"),
    [
        (0, {"decay_steps": 2}, "no effect with decay = 'none', got 2 and 0.0"),
        (0, {"decay_to": 0.5}, "no effect with decay = 'none', got None and 0.5"),
        (6, {"decay": "linear", "decay_steps": 5}, "got 6 and 5 for 10"),
        (10, {"decay": "linear"}, "got 10 and 1 for 10"),
    ],
)
def test_a_decay_that_cannot_be_is_refused(warmup, decay, said):
    with pytest.raises(ConfigError, match=said):
        config_with(warmup, decay)
