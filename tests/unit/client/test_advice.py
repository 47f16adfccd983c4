"""What status and dry run say of the time of a run, and of other settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slipstream.client.advice import advice_lines, profile_lines, time_lines
from slipstream.client.launch.launcher import run_all
from slipstream.core.advice import profile_to_json
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from slipstream.core.step_simulation import Episode, Profile, Setting
from support.fakes.small_configs import config_of

METRICS = {
    "step_s": 2.0,
    "training_s": 1.0,
    "groups_wait_s": 0.5,
    "publish_s": 0.25,
    "servers_sampling_share": 0.9,
    "servers_paused_share": 0.0,
    "servers_idle_share": 0.1,
    "lease_wait_slots_s": 1.5,
    "lease_wait_staleness_s": 0.5,
    "queue_s_mean": 3.0,
    "generation_s_mean": 4.0,
    "environment_s_mean": 1.5,
    "episode_rest_s_mean": 0.25,
}
# Eight episodes of 1 s in a step, on a server with eight places.
PROFILE = Profile(
    setting=Setting(servers=1, replicas=2, max_staleness=4, group_size=2),
    groups_per_step=4,
    places=8,
    engine_step_s=0.1,
    engine_token_s=0.0,
    training_fixed_s=0.0,
    training_token_s=0.005,
    publish_s=0.0,
    order_s=0.0,
    pause_s=0.0,
    groups=((Episode(10, 20, 0.0),) * 2,) * 4,
)


def planned(folder: Path, *, ranks: int = 1, groups: int = 4, places: int = 8) -> Config:
    """Settings that fit the profile, on `ranks` ranks."""
    config = config_of(folder)
    changes = {"group_size": 2, "groups_per_step": groups, "max_staleness": 4}
    return config.model_copy(
        update={
            "algorithm": config.algorithm.model_copy(update=changes),
            "learner": config.learner.model_copy(update={"world_size": ranks}),
            "rollout_server": config.rollout_server.model_copy(update={"max_episodes": places}),
        }
    )


def earlier(folder: Path) -> Path:
    """The folder of an earlier run."""
    (folder / "advice.json").write_text(json.dumps({"profile": profile_to_json(PROFILE)}))
    return folder


def test_the_time_of_a_step_is_told_by_cause() -> None:
    assert time_lines(METRICS) == [
        "a step takes 2.00 s: the trainer waits for the servers, which are full",
        "  trainer: training 50%, waiting for groups 25%, publish 12%, other 12%",
        "  servers: sampling 90%, idle 10%",
        "  the next lease waits for a step, by max_staleness 25%, a free place on a server 75%",
        "  queue: a complete group waits 3.00 s for its step",
        "  episode: engine 4.00 s, environment 1.50 s, rest 0.25 s",
    ]


def test_no_time_is_told_before_a_step_and_of_an_older_controller() -> None:
    assert time_lines({}) == []
    assert time_lines({"step_s": 2.0}) == []
    assert advice_lines(METRICS) == []


def test_changes_are_told_with_the_largest_gain_first_and_the_last_error() -> None:
    told = {"predicted_steps_per_s": 0.512, "wanted_servers": 3.0}
    gains = {"gain/server_more": 0.05, "gain/staleness_doubled": 0.31, "gain/rank_less": -0.2}
    head, *lines = advice_lines(told | gains)
    assert head == "predicted: 0.512 steps/s (not checked yet); rollout servers wanted: 3"
    assert lines == [
        "  max_staleness doubled        +31% steps/s",
        "  one rollout server more      +5% steps/s",
        "  one data-parallel rank less  -20% steps/s",
    ]
    head, *_ = advice_lines(told | gains | {"prediction_error": -0.041})
    assert "(the last one was off by -4%)" in head


def test_a_dry_run_predicts_from_the_times_of_an_earlier_run(tmp_path: Path) -> None:
    run = earlier(tmp_path)
    # 8 * 20 tokens of 5 ms on two ranks are 0.8 s; the server makes 8 episodes in 1 s.
    head, *_ = profile_lines(planned(tmp_path, ranks=2), run)
    assert f"By the profile of {run}: 1 steps/s" in head
    # On one rank 1.6 s, for half of the groups as long as on two.
    head, *lines = profile_lines(planned(tmp_path), run)
    assert ": 0.625 steps/s" in head
    assert lines[0].split("  ")[-1] == "+60% steps/s"
    assert "one data-parallel rank more" in lines[0]
    head, *_ = profile_lines(planned(tmp_path, groups=2), run)
    assert ": 1.25 steps/s" in head


@pytest.mark.parametrize("text", [None, "{}", "[1", '{"profile": {"groups": []}}', "[]"])
def test_a_folder_without_a_profile_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "advice.json").write_text(text)
    with pytest.raises(ConfigError, match="is missing or damaged"):
        profile_lines(planned(tmp_path), tmp_path)


async def test_a_profile_without_a_dry_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--profile belongs to --dry-run"):
        await run_all(tmp_path / "none.toml", [], dry_run=False, profile=tmp_path)
