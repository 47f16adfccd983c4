"""The settings with which learner and engines compute in turn."""

from typing import Any

import pytest
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config


def parsed(turns: str, **weights: Any) -> Config:
    values = {
        "run": {"name": "r", "steps": 1},
        "model": {"path": "model"},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 2, "max_episode_tokens": 8},
        "learner": {"offload": {"gradients": True, "optimizer": True}},
        "controller": {"turns": turns},
        "rollout_server": {"weights_from": "storage" if "storage_url" in weights else "trainer"},
        "weights": weights,
    }
    return parse_config(values, source="test")


def test_engines_that_give_their_memory_back_keep_none_for_arriving_weights() -> None:
    with pytest.raises(ConfigError, match='stage_on_server must be "auto" or false with .*"sleep"'):
        parsed("sleep", stage_on_server=True)
    assert parsed("sleep", stage_on_server="auto").staging is False
    assert parsed("pause", stage_on_server=True).staging is True


@pytest.mark.parametrize("turns", ["pause", "sleep"])
def test_a_server_that_reads_storage_takes_no_turns(turns: str) -> None:
    told = f'controller.turns must be "off" with .*"storage", got \'{turns}\''
    with pytest.raises(ConfigError, match=told):
        parsed(turns, storage_url="w")
    assert parsed("off", storage_url="w").rollout_server.weights_from == "storage"
