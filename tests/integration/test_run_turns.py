"""A whole run learns from rewards of turns, and is replayed."""

import pytest
from support.rigs.run_processes import (
    SLOW_RUN,
    check_replay,
    checked,
    copy_environments,
    rows_of,
    succeed,
    write_config,
)

pytestmark = [*SLOW_RUN, pytest.mark.timeout(900)]


def test_a_turn_that_decides_is_learned_by_its_own_reward(tmp_path, tiny_model):
    write_config(
        copy_environments(tmp_path),
        tiny_model,
        run__steps=60,
        environments=[{"name": "turns", "reference": "user_environments:ThreeTurns"}],
        evaluations=[],
        algorithm__advantage="return_to_go",
        algorithm__advantage_args={"gamma": 0},
        sampling__max_episode_tokens=64,
    )
    succeed("run", "config.toml", cwd=tmp_path, limit_s=600)
    summary = checked(tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert summary["reward_last"] >= summary["reward_first"] + 0.4
    for row in rows:
        assert row["turns/turn_rewards/2"] == pytest.approx(
            row["reward_mean"], abs=1e-6
        )
        assert row["turns/turn_rewards/1"] == row["turns/turn_rewards/3"] == 0
    check_replay(tmp_path / "run", cwd=tmp_path)
