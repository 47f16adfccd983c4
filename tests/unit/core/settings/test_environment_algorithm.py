"""Settings of the algorithm that one environment has in place of the run's."""

import pytest
from pydantic import JsonValue
from slipstream.core.configuration.config_file import dump_config, load_config
from slipstream.core.configuration.roles import reference_config
from slipstream.core.settings.config import Config
from support.fakes.small_configs import config_with, refusal_of

Table = dict[str, JsonValue]
DEMONSTRATIONS: Table = {"advantage": "score", "loss": "reinforce", "loss_weight": 0.5}


def config_of(own: Table, **algorithm: JsonValue) -> dict[str, object]:
    """The changes that give environment b `own` over the run's `algorithm`."""
    environment: Table = {"reference": "m:E"}
    changes: dict[str, object] = {
        "environments": [environment | {"name": "a"}, environment | {"name": "b", "algorithm": own}]
    } | {f"algorithm.{name}": value for name, value in algorithm.items()}
    if algorithm.get("advantage") == "gae":
        changes["critic"] = {"learning_rate": 1e-3}
    return changes


def made(own: Table, **algorithm: JsonValue) -> Config:
    return config_with(config_of(own, **algorithm))


def refusal(own: Table, **algorithm: JsonValue) -> str:
    return refusal_of(config_of(own, **algorithm))


def test_an_environment_has_its_own_settings_over_the_runs() -> None:
    config = made(DEMONSTRATIONS, loss_args={"clip_high": 0.28}, entropy_coefficient=0.1)
    algorithms = config.algorithms
    assert [algorithms.place(name) for name in ("a", "b", "submitted later")] == [0, 1, 0]
    own = config.algorithm_of("b")
    assert (own.advantage, own.loss, own.entropy_coefficient) == ("score", "reinforce", 0.1)
    # REINFORCE clips nothing: the run's range is none of its arguments.
    assert own.loss_args == {}
    assert config.algorithm_of("a") == config.algorithm
    assert [algorithms.loss_weight(name) for name in ("a", "b")] == [1.0, 0.5]


def test_an_environment_with_a_weight_alone_has_the_runs_algorithm() -> None:
    assert made({"loss_weight": 2.0}).algorithms.distinct == (made({}).algorithm,)


def test_a_table_replaces_the_runs_whole_table() -> None:
    config = made({"kl": {"coefficient": 0.1}}, kl={"coefficient": 1.0, "estimator": "k2"})
    assert config.algorithm_of("b").kl.model_dump() == {
        "coefficient": 0.1,
        "placement": "loss",
        "estimator": "k3",
    }


def test_a_divergence_of_one_environment_needs_the_reference() -> None:
    assert reference_config(made({"kl": {"coefficient": 0.1}})) is not None
    assert reference_config(made({})) is None


@pytest.mark.parametrize("name", ["group_size", "aggregation", "max_staleness"])
def test_settings_of_whole_steps_are_refused_by_name(name: str) -> None:
    message = refusal({name: 1})
    assert message == (
        f"environments.1.algorithm: {name} concerns whole steps, which hold episodes "
        f"of all environments: set algorithm.{name} for the run"
    )


def test_arguments_are_those_of_the_function_that_the_environment_has() -> None:
    run: Table = {"loss_args": {"clip_low": 0.1}}
    for own, expected in (
        ({"loss": "ppo"}, 0.1),
        ({"loss": "gspo"}, 0.2),
        ({"loss_args": {"clip_high": 0.3}}, 0.2),
    ):
        assert made(own, **run).algorithm_of("b").loss_args["clip_low"] == expected
    message = refusal({"loss_args": {"tau_positive": 2.0}})
    assert "algorithm of environment b: loss ppo has no argument 'tau_positive'" in message


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    message = refusal({"los": "ppo"})
    assert "unknown key 'environments.1.algorithm.los'; did you mean" in message


@pytest.mark.parametrize(
    ("own", "run", "rule"),
    [
        ({"loss": "trpo"}, {}, "environments.1.algorithm.loss: input should be ppo, gspo, "),
        ({"advantage": "none"}, {}, "it needs kl.coefficient > 0"),
        ({"advantage": "gae"}, {}, "'gae' in all environments or in none"),
        ({"advantage": "grpo"}, {"advantage": "gae"}, "'gae' in all environments or in none"),
        ({"advantage": "score"}, {"filter": "unequal_rewards"}, "filter must be 'none'"),
        ({"reward": "overlong", "reward_args": {"cache_tokens": 17}}, {}, "got 17 and 4"),
    ],
)
def test_rules_between_settings_hold_for_an_environment(own: Table, run: Table, rule: str) -> None:
    assert rule in refusal(own, **run)


def test_warnings_about_old_tokens_are_those_of_all_environments() -> None:
    assert made({}).algorithms.staleness_warnings == []
    (warning,) = made({"weight": "none"}).algorithms.staleness_warnings
    assert "without a correction" in warning


def test_settings_of_an_environment_are_read_as_they_were_written(tmp_path) -> None:
    config = made(DEMONSTRATIONS | {"kl": {"coefficient": 0.1}})
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
