import copy
import tomllib

import pytest
from pydantic import JsonValue, ValidationError
from slipstream.core.configuration.config_file import dump_config, parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.config import Config

SMALLEST: dict[str, JsonValue] = {
    "run": {"name": "test", "steps": 10},
    "model": {"path": "models/tiny"},
    "algorithm": {"group_size": 4, "groups_per_step": 8, "learning_rate": 1e-3},
    "sampling": {"max_reply_tokens": 16, "max_episode_tokens": 64},
}


def config(**algorithm: JsonValue) -> Config:
    table = copy.deepcopy(SMALLEST)
    table["algorithm"] |= algorithm  # type: ignore[operator]
    return parse_config(table, source="test.toml")


def section(**changes: JsonValue) -> AlgorithmSection:
    return AlgorithmSection.model_validate(SMALLEST["algorithm"] | changes)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"loss": "trpo"},
            "algorithm.loss: input should be ppo, gspo, cispo, sapo, reinforce or module:function, "
            "got 'trpo'",
        ),
        (
            {"loss_args": {"clip_low": True}},
            "algorithm.loss_args: clip_low of loss ppo: input should be a number, got true",
        ),
        (
            {"loss": "sapo", "loss_args": {"clip_low": 0.1}},
            "algorithm.loss_args: loss sapo has no argument 'clip_low'; known: tau_positive, "
            "tau_negative, ratio",
        ),
        (
            {"loss": "reinforce", "loss_args": {"ratio": "behavior"}},
            "algorithm.loss_args: loss reinforce has no argument 'ratio'; known: none",
        ),
        (
            {"loss": "reinforce", "mini_batches": 2},
            "algorithm: loss = 'reinforce' has no ratio that leads on from the policy before the "
            "step: with several mini_batches or epochs weight_args.to must be 'present'",
        ),
        (
            {"group_size": 1},
            "algorithm: advantage = 'grpo' compares a group: group_size must be >= 2, got 1",
        ),
        (
            {"group_size": 1, "advantage": "reinforce_pp", "filter": "unequal_rewards"},
            "algorithm: filter = 'unequal_rewards' would leave out every group of group_size = 1",
        ),
        (
            {"advantage": "none", "kl": {"coefficient": 1.0, "placement": "reward"}},
            "algorithm: advantage = 'none' trains no reward: it needs kl.coefficient > 0 and "
            "kl.placement = 'loss', got 1.0 and 'reward'",
        ),
        (
            {"advantage": "score", "filter": "unequal_rewards"},
            "algorithm: filter = 'unequal_rewards' leaves out groups of equal rewards, but "
            "advantage = 'score' compares none",
        ),
        (
            {"advantage_args": {"lam": 0.9}},
            "algorithm.advantage_args: advantage grpo has no argument 'lam'; known: none",
        ),
        (
            {"fixed_tokens": 100},
            "algorithm: fixed_tokens has no effect with aggregation = 'token_mean'",
        ),
        (
            {"loss_args": {"ratio": "behavior"}},
            "algorithm: ratio = 'behavior' of the loss corrects already: weight must be 'none', "
            "got 'token'",
        ),
        (
            {"weight": "none", "weight_args": {"cap": 3.0}},
            "algorithm.weight_args: weight none has no argument 'cap'; known: token_band, "
            "sequence_band, to",
        ),
        (
            {"weight_args": {"cap": 1.0, "token_band": [1.5, 2.0]}},
            "algorithm: token_band of the weight begins at 1.5, above its cap 1.0",
        ),
        (
            {"weight_args": {"sequence_band": [2.0, 1.0]}},
            "algorithm.weight_args: sequence_band must be [low, high] with low < high, got "
            "[2.0, 1.0]",
        ),
        (
            {"kl": {"coefficient": 0.1, "estimator": "k1"}},
            "algorithm: kl.estimator = 'k1' in the loss has a gradient of mean 0: take k2 or k3, "
            "or kl.placement = 'reward'",
        ),
        (
            {"reward": "overlong"},
            "algorithm.reward_args: reward overlong needs the argument 'cache_tokens'",
        ),
        (
            {"reward": "overlong", "reward_args": {"cache_tokens": 17}},
            "algorithm.reward_args.cache_tokens must be at most sampling.max_reply_tokens, got 17 "
            "and 16",
        ),
        (
            {"weight_args": {"bands": 1}},
            "algorithm.weight_args: weight token has no argument 'bands'; known: token_band, "
            "sequence_band, to, cap",
        ),
    ],
)
def test_combination_without_a_meaning_is_refused_in_one_line(
    changes: dict[str, JsonValue], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    found = str(caught.value).removeprefix("test.toml: ")
    assert found.startswith(message)
    assert "\n" not in found


def test_arguments_are_written_down_with_their_defaults() -> None:
    """A run's own config.toml names every setting and can be loaded again."""
    for loss in ("gspo", "cispo", "sapo"):
        changed = config(loss=loss, weight_args={"token_band": [0.5, 5.0], "cap": 5.0})
        table = tomllib.loads(dump_config(changed))
        assert table["algorithm"]["loss_args"]["ratio"] == "proximal"
        assert parse_config(table, source="config.toml") == changed


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_staleness": 0, "weight": "none"},
        {"weight": "none", "weight_args": {"token_band": [0.5, 2.0]}},
        {"weight": "none", "weight_args": {"sequence_band": [0.5, 2.0]}},
        {"loss": "cispo", "loss_args": {"ratio": "behavior"}, "weight": "none"},
    ],
)
def test_corrected_or_synchronous_training_gets_no_warning(changes: dict[str, JsonValue]) -> None:
    assert section(**changes).staleness_warning is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "as if the newest had sampled them"),
        ({"loss": "reinforce"}, "as if the newest had sampled them"),
        ({"loss_args": {"ratio": "behavior"}}, "have no gradient"),
    ],
)
def test_stale_tokens_without_a_correction_are_warned_of(
    changes: dict[str, JsonValue], words: str
) -> None:
    warning = section(max_staleness=3, weight="none", **changes).staleness_warning
    assert warning is not None
    assert warning.startswith("algorithm.max_staleness is 3 without a correction: ")
    assert words in warning


def test_every_published_combination_is_accepted() -> None:
    """Checks the combinations of the table in docs/algorithms.md that need no other model."""
    for changes in (
        {},
        {
            "loss_args": {"clip_high": 0.28},
            "filter": "unequal_rewards",
            "leave_out_truncated": True,
        },
        {"advantage": "dr_grpo", "aggregation": "fixed"},
        {"advantage": "rloo", "loss": "reinforce"},
        {"advantage": "reinforce_pp", "group_size": 1},
        {"advantage": "reinforce_pp_baseline"},
        {"loss": "gspo", "loss_args": {"clip_low": 3e-4, "clip_high": 4e-4}},
        {
            "loss": "cispo",
            "loss_args": {"clip_low": 1.0, "clip_high": 3.0, "ratio": "behavior"},
            "weight": "none",
        },
        {"loss": "sapo", "aggregation": "sequence_mean"},
        {"mini_batches": 4, "loss_args": {"dual_clip": 3.0}},
    ):
        config(**changes)


def test_a_band_has_two_ends() -> None:
    with pytest.raises(ValidationError):
        section(weight_args={"token_band": [0.5]})
