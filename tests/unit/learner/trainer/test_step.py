from __future__ import annotations

import pytest
from pydantic import JsonValue
from slipstream.learner.trainer.step import learning_rate
from slipstream.protocol.settings.config import Config
from slipstream.protocol.settings.config_file import parse_config


def config_with(warmup_steps: int, **tables: JsonValue) -> Config:
    algorithm: dict[str, JsonValue] = {
        "group_size": 2,
        "groups_per_step": 1,
        "learning_rate": 0.4,
        "warmup_steps": warmup_steps,
        "advantage": "gae" if tables else "grpo",
    }
    table: dict[str, JsonValue] = {
        "run": {"name": "test", "steps": 10},
        "model": {"path": "models/tiny"},
        "algorithm": algorithm,
        "sampling": {"max_reply_tokens": 16, "max_episode_tokens": 64},
    }
    return parse_config(table | tables, source="test")


def test_learning_rate_is_constant_without_warmup() -> None:
    config = config_with(0)
    assert [learning_rate(config, step) for step in (0, 1, 99)] == [0.4, 0.4, 0.4]


def test_learning_rate_rises_evenly_over_the_warmup_and_stays() -> None:
    config = config_with(4)
    found = [learning_rate(config, step) for step in range(6)]
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_the_policys_warmup_begins_when_the_critics_is_over() -> None:
    config = config_with(2, critic={"learning_rate": 1.0, "warmup_steps": 3})
    found = [learning_rate(config, step) for step in range(6)]
    assert found == pytest.approx([0.0, 0.0, 0.0, 0.2, 0.4, 0.4])
