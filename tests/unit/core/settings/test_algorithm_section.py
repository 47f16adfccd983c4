from __future__ import annotations

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
        ({"loss": "trpo"}, "algorithm.loss: input should be 'ppo', 'gspo', 'cispo', 'sapo' or"),
        (
            {"loss": "sapo", "clip_low": 0.1},
            "algorithm: clip_low has no effect with loss = 'sapo', got 0.1",
        ),
        (
            {"loss": "reinforce", "clip_high": 0.3},
            "algorithm: clip_high has no effect with loss = 'reinforce', got 0.3",
        ),
        (
            {"loss": "gspo", "dual_clip": 3.0},
            "algorithm: dual_clip has no effect with loss = 'gspo', got 3.0",
        ),
        (
            {"sapo_tau": [2.0, 1.0]},
            "algorithm: sapo_tau has no effect with loss = 'ppo', got (2.0, 1.0)",
        ),
        (
            {"loss": "reinforce", "ratio": "behavior", "correction": {"weight": "none"}},
            "algorithm: ratio has no effect with loss = 'reinforce', got 'behavior'",
        ),
        (
            {"group_size": 1},
            "algorithm: advantage = 'grpo' compares a group: group_size must be >= 2, got 1",
        ),
        (
            {"group_size": 1, "advantage": "reinforce_pp", "dynamic_sampling": {"enabled": True}},
            "algorithm: dynamic_sampling would filter every group of group_size = 1",
        ),
        (
            {"advantage": "none", "kl": {"coefficient": 1.0, "placement": "reward"}},
            "algorithm: advantage = 'none' trains no reward: it needs kl.coefficient > 0 and "
            "kl.placement = 'loss', got 1.0 and 'reward'",
        ),
        (
            {"advantage": "score", "dynamic_sampling": {"enabled": True}},
            "algorithm: dynamic_sampling leaves out groups of equal rewards, but advantage = "
            "'score' compares none",
        ),
        (
            {"gae": {"lam": 0.9}},
            "algorithm: the table gae has no effect with advantage = 'grpo'",
        ),
        (
            {"fixed_tokens": 100},
            "algorithm: fixed_tokens has no effect with aggregation = 'token_mean'",
        ),
        (
            {"ratio": "behavior"},
            "algorithm: ratio = 'behavior' corrects already: correction.weight must be 'none', "
            "got 'token'",
        ),
        (
            {"correction": {"weight": "none", "cap": 3.0}},
            "algorithm: correction.cap has no effect with correction.weight = 'none', got 3.0",
        ),
        (
            {"correction": {"cap": 1.0, "token_band": [1.5, 2.0]}},
            "algorithm: correction.token_band begins at 1.5, above correction.cap 1.0",
        ),
        (
            {"correction": {"sequence_band": [2.0, 1.0]}},
            "algorithm.correction: sequence_band must be [low, high] with low < high, got "
            "[2.0, 1.0]",
        ),
        (
            {"kl": {"coefficient": 0.1, "estimator": "k1"}},
            "algorithm: kl.estimator = 'k1' in the loss has a gradient of mean 0: take k2 or k3, "
            "or kl.placement = 'reward'",
        ),
        (
            {"overlong": {"penalty": 1.0}},
            "algorithm.overlong: penalty needs cache_tokens >= 1, got penalty 1.0 and 0",
        ),
        (
            {"overlong": {"penalty": 1.0, "cache_tokens": 17}},
            "algorithm.overlong.cache_tokens must be at most sampling.max_reply_tokens, got 17 "
            "and 16",
        ),
        (
            {"correction": {"bands": 1}},
            "unknown key 'algorithm.correction.bands'; did you mean 'token_band'?",
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


def test_settings_of_another_loss_may_be_written_down_with_their_defaults() -> None:
    """A run's own config.toml names every setting and can be loaded again."""
    for loss in ("gspo", "cispo", "sapo"):
        changed = config(loss=loss, correction={"token_band": [0.5, 5.0], "cap": 5.0})
        table = tomllib.loads(dump_config(changed))
        assert table["algorithm"]["sapo_tau"] == [1.0, 1.05]
        assert parse_config(table, source="config.toml") == changed


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_staleness": 0, "correction": {"weight": "none"}},
        {"correction": {"weight": "none", "token_band": [0.5, 2.0]}},
        {"correction": {"weight": "none", "sequence_band": [0.5, 2.0]}},
        {"loss": "cispo", "ratio": "behavior", "correction": {"weight": "none"}},
    ],
)
def test_corrected_or_synchronous_training_gets_no_warning(changes: dict[str, JsonValue]) -> None:
    assert section(**changes).staleness_warning is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "as if the newest had sampled them"),
        ({"loss": "reinforce"}, "as if the newest had sampled them"),
        ({"ratio": "behavior"}, "have no gradient"),
    ],
)
def test_stale_tokens_without_a_correction_are_warned_of(
    changes: dict[str, JsonValue], words: str
) -> None:
    warning = section(max_staleness=3, correction={"weight": "none"}, **changes).staleness_warning
    assert warning is not None
    assert warning.startswith("algorithm.max_staleness is 3 without a correction: ")
    assert words in warning


def test_every_published_combination_is_accepted() -> None:
    """Checks the combinations of the table in docs/algorithms.md that need no other model."""
    none = {"weight": "none"}
    for changes in (
        {},
        {"clip_high": 0.28, "dynamic_sampling": {"enabled": True}, "overlong": {"filter": True}},
        {"advantage": "dr_grpo", "aggregation": "fixed"},
        {"advantage": "rloo", "loss": "reinforce"},
        {"advantage": "reinforce_pp", "group_size": 1},
        {"advantage": "reinforce_pp_baseline"},
        {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
        {
            "loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 3.0,
            "ratio": "behavior",
            "correction": none,
        },
        {"loss": "sapo", "aggregation": "sequence_mean"},
        {"mini_batches": 4, "dual_clip": 3.0},
    ):
        config(**changes)


def test_a_band_has_two_ends() -> None:
    with pytest.raises(ValidationError):
        section(correction={"token_band": [0.5]})
