"""Settings of precision: engines in FP8, and how weights are rounded."""

from typing import Any

import pytest
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config

QUANTISED = {"quantization": "fp8_per_channel"}
NO_WEIGHT = {"weight": "none"}


def config_with(server: dict[str, Any], **tables: dict[str, Any]) -> Config:
    table: dict[str, Any] = {
        "run": {"name": "test", "steps": 1},
        "model": {"path": "/model", "dtype": "bfloat16"},
        "algorithm": {"group_size": 4, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 64},
        "rollout_server": server,
    }
    for name, values in tables.items():
        table[name] = table.get(name, {}) | values
    return parse_config(table, source="test")


def test_quantised_engines_need_nothing_but_bfloat16() -> None:
    config = config_with(QUANTISED)
    assert config.algorithm.weight == "token"
    config_with(QUANTISED, weights={"delta": "gpu"})


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"model": {"dtype": "float32"}}, "needs model.dtype = 'bfloat16', got 'float32'"),
        (
            {"lora": {"rank": 8, "publish": "adapters"}},
            "needs lora.publish = 'merged', got 'adapters'",
        ),
        (
            {"weights": {"delta": "gpu"}, "rollout_server": {"tensor_parallel_size": 2}},
            "needs weights.delta = 'off' or rollout_server.tensor_parallel_size = 1: scales are "
            "taken of whole rows, got 'gpu' and 2",
        ),
    ],
)
def test_what_does_not_go_with_quantised_weights_is_refused(
    tables: dict[str, dict[str, Any]], line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config_with(QUANTISED, **tables)
    assert f"rollout_server.quantization = 'fp8_per_channel' {line}" in str(refused.value)


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"model": {"dtype": "float32"}}, "needs model.dtype = 'bfloat16', got 'float32'"),
        ({"model": {"dtype": "float16"}}, "needs model.dtype = 'bfloat16', got 'float16'"),
        (
            {
                "learner": {
                    "use_distributed_optimizer": True,
                    "optimizer": {"use_precision_aware_optimizer": True},
                }
            },
            "excludes learner.optimizer.use_precision_aware_optimizer, which makes weights itself",
        ),
    ],
)
def test_stochastic_rounding_is_of_bfloat16_weights_with_masters(
    tables: dict[str, dict[str, Any]], line: str
) -> None:
    learner = tables.pop("learner", {}) | {"rounding": "stochastic"}
    config_with({}, learner={"rounding": "stochastic"})
    with pytest.raises(ConfigError) as refused:
        config_with({}, learner=learner, **tables)
    assert f"learner.rounding = 'stochastic' {line}" in str(refused.value)


@pytest.mark.parametrize("server", [QUANTISED, {"engine": {"kv_cache_dtype": "FP8_e4m3"}}])
def test_engines_in_fp8_need_a_correction(server: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="algorithm.weight must be token or sequence"):
        config_with(server, algorithm=NO_WEIGHT)
    band = NO_WEIGHT | {"weight_args": {"token_band": [0.5, 2.0]}}
    for corrected in ({}, band, NO_WEIGHT | {"loss_args": {"ratio": "behavior"}}):
        config_with(server, algorithm=corrected)
    config_with({"engine": {"kv_cache_dtype": "auto"}}, algorithm=NO_WEIGHT)


@pytest.mark.parametrize("server", [QUANTISED, {"engine": {"kv_cache_dtype": "fp8"}}])
def test_a_probe_allows_for_the_rounding_of_fp8(server: dict[str, Any]) -> None:
    assert config_with(server).probe_tolerance == 0.5
    assert config_with(server, debug={"probe_tolerance": 0.2}).probe_tolerance == 0.2
    assert config_with({}).probe_tolerance == 0.16


def test_quantization_cannot_be_passed_through() -> None:
    with pytest.raises(ConfigError, match=r"engine.quantization .*: set rollout_server.quantiz"):
        config_with({"engine": {"quantization": "fp8_per_channel"}})
