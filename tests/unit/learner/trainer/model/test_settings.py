from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from slipstream.learner.trainer.model.settings import passed_through
from slipstream.protocol.errors import ConfigError


@dataclass
class Settings:
    bucket_size: int = 1
    overlap_grad_reduce: bool = False
    main_params_dtype: torch.dtype = torch.float32
    tensor_model_parallel_size: int = 1
    average_in_collective: bool = False


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


def test_value_that_the_trainer_depends_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="the trainer depends on its value"):
        passed_through(Settings, {"average_in_collective": True}, section="learner.ddp")
