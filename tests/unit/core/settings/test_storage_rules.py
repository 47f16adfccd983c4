"""The settings of weights that travel through storage."""

from typing import Any

import pytest
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config


def parsed(**sections: dict[str, Any]) -> Config:
    values = {
        "run": {"name": "r", "steps": 1},
        "model": {"path": "model"},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 2, "max_episode_tokens": 8},
    }
    return parse_config(values | sections, source="test")


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret-of-mine@bucket/prefix",
        "https://store/weights?signature=secret-of-mine",
        "memory://weights#secret-of-mine",
        "simplecache::s3://key:secret-of-mine@bucket/prefix",
    ],
)
def test_a_url_with_credentials_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="weights.storage_url: .*no user, password") as raised:
        parsed(weights={"storage_url": url})
    assert "secret-of-mine" not in str(raised.value)


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "/mnt/weights", "weights", "memory://w"])
def test_a_folder_or_a_url_is_taken(url: str) -> None:
    assert parsed(weights={"storage_url": url}).weights.storage_url == url


def test_a_server_that_reads_storage_needs_to_know_where() -> None:
    with pytest.raises(ConfigError, match='weights_from = "storage" needs weights.storage_url'):
        parsed(rollout_server={"weights_from": "storage"})


def test_adapters_apart_do_not_go_through_storage() -> None:
    with pytest.raises(ConfigError, match='lora.publish must be "merged" with weights.storage_url'):
        parsed(weights={"storage_url": "w"}, lora={"rank": 2, "publish": "adapters"})
