"""The arguments of the rollout server's program."""

from pathlib import Path

import pytest
from slipstream.core.configuration.config_file import dump_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from slipstream.rollout_server.__main__ import read_settings


@pytest.fixture
def path(config: Config, tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config))
    return path


def test_the_number_of_episodes_of_a_program_takes_the_place_of_the_setting(path: Path) -> None:
    assert read_settings(path, None).rollout_server.max_episodes == 8
    assert read_settings(path, 4).rollout_server.max_episodes == 4


@pytest.mark.parametrize("number", [0, -1])
def test_a_program_without_room_for_an_episode_is_refused(path: Path, number: int) -> None:
    problem = f"rollout_server.max_episodes: input should be .*, got {number}"
    with pytest.raises(ConfigError, match=problem):
        read_settings(path, number)


def test_a_program_without_room_for_a_group_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="group_size must be at most .*, got 4 and 3"):
        read_settings(path, 3)
