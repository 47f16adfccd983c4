import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from slipstream.core.errors import ConfigError
from slipstream.learner.trainer.model.recipe import passed_through


class Backend(enum.Enum):
    flash = 1
    auto = 5


@dataclass
class Settings:
    bucket_size: int = 1
    overlap_grad_reduce: bool = False
    main_params_dtype: torch.dtype = torch.float32
    tensor_model_parallel_size: int = 1
    average_in_collective: bool = False
    use_distributed_optimizer: bool = False
    adam_eps: float = 1e-8
    lr: float | None = None
    recompute_granularity: Literal["full", "selective"] | None = None
    window_size: tuple[int, int] | None = None
    moe_layer_freq: int | list[int] = 1
    activation_func: Callable[[], None] | None = None
    attention_backend: Backend = Backend.auto


def test_known_keys_pass_through_by_name() -> None:
    settings = {"bucket_size": 7, "overlap_grad_reduce": True}
    assert passed_through(Settings, settings, section="learner.ddp") == settings
    assert passed_through(Settings(), settings, section="learner.ddp") == settings


def test_names_of_element_types_become_the_types() -> None:
    found = passed_through(Settings, {"main_params_dtype": "bfloat16"}, section="learner.optimizer")
    assert found == {"main_params_dtype": torch.bfloat16}
    with pytest.raises(ConfigError, match="'bf16' is no element type"):
        passed_through(Settings, {"main_params_dtype": "bf16"}, section="learner.optimizer")


def test_unknown_key_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(
        ConfigError,
        match=r"key learner\.ddp\.overlap_grad_reduction; did you mean 'overlap_grad_reduce'",
    ):
        passed_through(Settings, {"overlap_grad_reduction": True}, section="learner.ddp")


def test_size_of_a_parallel_group_is_refused_with_the_setting_to_use() -> None:
    with pytest.raises(ConfigError, match=r"set learner\.parallel\.tp instead"):
        passed_through(Settings, {"tensor_model_parallel_size": 2}, section="learner.transformer")


def test_distributed_optimizer_is_given_in_one_place() -> None:
    settings = {"use_distributed_optimizer": True}
    assert passed_through(Settings, settings, section="learner.ddp") == settings
    with pytest.raises(ConfigError, match=r"set learner\.ddp\.use_distributed_optimizer instead"):
        passed_through(Settings, settings, section="learner.optimizer")


def test_value_that_the_trainer_depends_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="the trainer depends on its value"):
        passed_through(Settings, {"average_in_collective": True}, section="learner.ddp")


def test_a_name_that_is_nearly_one_of_ours_is_told_the_setting_to_use() -> None:
    with pytest.raises(ConfigError) as caught:
        passed_through(Settings, {"lrr": 0.1}, section="learner.optimizer")
    assert str(caught.value) == (
        "unknown key learner.optimizer.lrr; 'lr' cannot be passed through: "
        "set algorithm.learning_rate instead"
    )


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("adam_eps", "abc", "must be a valid number, got 'abc'"),
        ("bucket_size", 1.5, "must be a valid integer, got 1.5"),
        ("bucket_size", True, "must be a valid integer, got True"),
        ("overlap_grad_reduce", "yes", "must be a valid boolean, got 'yes'"),
        ("recompute_granularity", "half", "must be 'full' or 'selective', got 'half'"),
        ("window_size", [1, "b"], "must be a valid integer, got [1, 'b']"),
        ("moe_layer_freq", "x", "must be a valid integer or a valid array, got 'x'"),
        ("main_params_dtype", 32, "32 is no element type of torch"),
        ("activation_func", "gelu", "must be callable, got 'gelu'"),
        ("attention_backend", "flsh", "must be one of flash, auto, got 'flsh'"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_type(key, value, rule):
    with pytest.raises(ConfigError) as caught:
        passed_through(Settings, {key: value}, section="learner.ddp")
    assert f"learner.ddp.{key}" in str(caught.value)
    assert str(caught.value).endswith(rule)


def test_values_of_the_right_type_pass_as_they_are() -> None:
    settings = {"adam_eps": 1, "window_size": [1, 2], "moe_layer_freq": [0, 1]}
    assert passed_through(Settings, settings, section="learner.ddp") == settings
    enum_name = {"attention_backend": "flash"}
    found = passed_through(Settings(), enum_name, section="learner.transformer")
    assert found == {"attention_backend": Backend.flash}
