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


@pytest.mark.parametrize(
    ("section", "key", "said"),
    [
        (
            "ddp",
            "overlap_grad_reduction",
            "unknown key {}; did you mean 'overlap_grad_reduce'",
        ),
        (
            "transformer",
            "tensor_model_parallel_size",
            "{} {}: set learner.parallel.tp instead",
        ),
        (
            "optimizer",
            "use_distributed_optimizer",
            "{} {}: set learner.ddp.use_distributed_optimizer instead",
        ),
        ("ddp", "average_in_collective", "{} {}: the trainer depends on its value"),
        (
            "optimizer",
            "lrr",
            "unknown key {}; 'lr' {}: set algorithm.learning_rate instead",
        ),
    ],
)
def test_a_key_that_is_unknown_or_ours_is_refused_with_what_to_set(section, key, said):
    with pytest.raises(ConfigError) as caught:
        passed_through(Settings, {key: True}, section=f"learner.{section}")
    expected = said.format(f"learner.{section}.{key}", "cannot be passed through")
    assert str(caught.value).removesuffix("?") == expected


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
        ("main_params_dtype", "bf16", "'bf16' is no element type of torch"),
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
    settings = {"adam_eps": 1, "window_size": [1, 2], "use_distributed_optimizer": True}
    assert passed_through(Settings, settings, section="learner.ddp") == settings
    names = {"attention_backend": "flash", "main_params_dtype": "bfloat16"}
    values = passed_through(Settings(), names, section="learner.transformer")
    assert values == {
        "attention_backend": Backend.flash,
        "main_params_dtype": torch.bfloat16,
    }
