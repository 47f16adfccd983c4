import pytest
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config


def make_config(**sections: object) -> Config:
    table: dict[str, object] = {
        "run": {"name": "test", "steps": 10},
        "model": {"path": "models/tiny"},
        "algorithm": {"group_size": 4, "groups_per_step": 2, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 64},
    }
    return parse_config(table | sections, source="test.toml")


def refusal(**sections: object) -> str:
    with pytest.raises(ConfigError) as caught:
        make_config(**sections)
    return str(caught.value).removeprefix("test.toml: ")


def evaluation(**settings: object) -> list[dict[str, object]]:
    return [{"name": "held", "reference": "m:E", **settings}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_episodes": 9, "samples_per_task": 2},
            "evaluations.0: num_episodes must be a multiple of samples_per_task, got 9 and 2",
        ),
        (
            {"samples_per_task": 2, "pass_at": [1, 4]},
            "evaluations.0: pass_at must be at most samples_per_task, got 4 and 2",
        ),
        (
            {"samples_per_task": 2, "temperature": 0},
            "evaluations.0: samples_per_task of 2 needs a temperature above 0: "
            "the most probable tokens are always the same",
        ),
        (
            {"max_reply_tokens": 64},
            "sampling.max_episode_tokens must leave room for a prompt beside max_reply_tokens of "
            "evaluation held, got 64 and 64",
        ),
    ],
)
def test_an_evaluation_that_cannot_work_is_refused(settings: dict, message: str) -> None:
    assert refusal(evaluations=evaluation(**settings)) == message


def test_the_limit_of_prompts_leaves_room_for_a_reply() -> None:
    sampling = {"max_reply_tokens": 8, "max_episode_tokens": 64, "max_prompt_tokens": 64}
    assert refusal(sampling=sampling) == (
        "sampling.max_prompt_tokens must be below max_episode_tokens, got 64 and 64"
    )


def test_an_evaluation_may_sample_longer_replies_than_training() -> None:
    config = make_config(evaluations=evaluation(max_reply_tokens=63))
    assert config.evaluations[0].max_reply_tokens == 63


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (
            {"start_step": 11},
            "debug.profile.start_step must be at most run.steps, got 11 and 10",
        ),
        (
            {"start_step": 1, "ranks": [0, 1]},
            "debug.profile.ranks must be below learner.world_size, got 1 and 1",
        ),
    ],
)
def test_a_profile_that_would_never_be_written_is_refused(profile: dict, message: str) -> None:
    assert refusal(debug={"profile": profile}) == message


def test_several_trackers_may_be_chosen_and_unknown_ones_are_refused() -> None:
    config = make_config(tracking={"trackers": ["tensorboard", "wandb", "mlflow"]})
    assert config.tracking.trackers == ("tensorboard", "wandb", "mlflow")
    assert refusal(tracking={"trackers": ["console"]}).startswith("tracking.trackers.0: ")
