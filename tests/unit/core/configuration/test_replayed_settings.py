"""Which settings a replay may change."""

import json

import pytest
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.configuration.replayed_settings import (
    PLACES,
    TRAINING,
    comparison_problems,
    places_and_training,
    trial_problems,
)
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config, flat_settings


def settings(**changes: dict[str, object]) -> Config:
    table: dict[str, dict[str, object]] = {
        "run": {"name": "r", "steps": 4},
        "model": {"path": "nowhere"},
        "algorithm": {"learning_rate": 1e-3},
    }
    for name, values in changes.items():
        table[name] = table.get(name, {}) | values
    return parse_config(json.loads(json.dumps(table)), source="test")


def test_overrides_are_divided_and_a_new_function_has_its_own_arguments() -> None:
    overrides = [
        "model.path=x",
        "algorithm.loss=gspo",
        "--algorithm.kl.coefficient=0.1",
    ]
    assert places_and_training(overrides) == (
        ["model.path=x"],
        [
            "algorithm.loss_args={}",
            "algorithm.loss=gspo",
            "--algorithm.kl.coefficient=0.1",
        ],
    )


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("sampling.temperature", "the recorded batches were made with it"),
        ("algorithm.group_size", "the recorded batches were made with it"),
        ("environments.0.weight", "the recorded batches were made with it"),
        ("algorithm", "name its settings one by one, such as algorithm.KEY=VALUE"),
        ("checkpoint.keep_last", "none of those by which a recorded batch is trained"),
        ("algorithm.losss", "did you mean 'algorithm.loss'?"),
    ],
)
def test_any_other_setting_is_refused_with_the_reason(name: str, cause: str) -> None:
    with pytest.raises(ConfigError) as refused:
        places_and_training([f"{name}=1"])
    assert str(refused.value).startswith(f"{name} cannot be another in a replay: ")
    assert cause in str(refused.value)


def test_every_setting_that_may_change_exists() -> None:
    all_settings = settings(
        reference={"path": "x"},
        algorithm={"kl": {"coefficient": 0.1}, "advantage": "gae"},
        critic={"path": "y", "learning_rate": 1e-3},
    )
    names = {name for name, _ in flat_settings(all_settings.model_dump(mode="json"))}
    for allowed in (*TRAINING, *PLACES):
        assert any(f"{name}.".startswith(f"{allowed}.") for name in names), allowed


def test_a_teachers_folder_is_a_place_and_its_environments_are_not() -> None:
    override = "reference.teachers.math.path=elsewhere"
    assert places_and_training([override]) == ([override], [])
    with pytest.raises(ConfigError, match="cannot be another in a replay"):
        places_and_training(["reference.teachers.math.environments=[]"])


def test_what_chose_the_groups_stays() -> None:
    original = settings(algorithm={"filter": "unequal_rewards"})
    changed = settings(
        algorithm={"filter": "unequal_rewards", "leave_out_truncated": True}
    )
    (problem,) = comparison_problems(original, changed)
    assert problem.startswith("algorithm.leave_out_truncated cannot be another")
    assert not list(
        comparison_problems(settings(), settings(algorithm={"loss": "gspo"}))
    )


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (
            {
                "controller": {"client_loop": True},
                "learner": {"shared_prefix_tokens": 0},
            },
            "own loop",
        ),
        (
            {
                "lora": {
                    "rank": 2,
                    "alpha": 2.0,
                    "adapters": ["a", "b"],
                    "publish": "adapters",
                }
            },
            "got a, b",
        ),
    ],
)
def test_a_run_whose_state_is_more_than_one_policy_is_refused(
    changes: dict[str, dict[str, object]], cause: str
) -> None:
    (problem,) = trial_problems(settings(**changes))
    assert cause in problem
