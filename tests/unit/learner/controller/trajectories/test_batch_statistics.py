from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from slipstream.learner.controller.reporting.resources import RunResources
from slipstream.learner.controller.trajectories.batch_statistics import (
    batch_statistics,
    environment_means,
)
from slipstream.protocol.types import (
    GroupId,
    PolicyVersion,
    Purpose,
    ServerId,
    Status,
    Trajectory,
    VersionSpan,
)


def trajectory(reward: float, *run_lengths: int, **changes: object) -> Trajectory:
    sampled = sum(run_lengths[1::2])
    made = Trajectory(
        run_id="r",
        group_id=GroupId("g"),
        member=0,
        attempt=0,
        server_id=ServerId("s"),
        server_epoch=1,
        environment="e",
        task_index=0,
        seed=0,
        purpose=Purpose.TRAINING,
        status=Status.COMPLETED,
        token_ids=np.zeros(sum(run_lengths), np.uint32),
        run_lengths=run_lengths,
        behavior_logprobs=np.zeros(sampled, np.float32),
        version_spans=(VersionSpan(sampled, PolicyVersion(0, 0)),),
        reward=reward,
        num_turns=len(run_lengths) // 2,
    )
    return dataclasses.replace(made, **changes)


def test_rewards_lengths_turns_and_times_of_a_batch():
    batch = [
        trajectory(1.0, 3, 5, 2, 4, generation_s=3.0, environment_s=0.5),
        trajectory(-2.0, 7, 1, status=Status.TRUNCATED, generation_s=1.0),
    ]
    assert batch_statistics(batch) == {
        "reward_min": -2.0,
        "reward_max": 1.0,
        "prompt_tokens_mean": 5.0,
        "reply_tokens_max": 5.0,
        "episode_tokens_mean": 11.0,
        "episode_tokens_max": 14.0,
        "turns_mean": 1.5,
        "truncated_fraction": 0.5,
        "generation_s_mean": 2.0,
        "environment_s_mean": 0.25,
    }


def test_each_environment_has_its_own_means():
    batch = [
        trajectory(1.0, 1, 1, metrics={"right": 1.0}),
        trajectory(0.0, 1, 1, metrics={"right": 0.0}),
        trajectory(5.0, 1, 1, environment="f"),
    ]
    assert environment_means(batch) == {"e/reward": 0.5, "e/right": 0.5, "f/reward": 5.0}


def test_resources_add_up_over_steps_and_peaks_are_the_largest():
    rows = [
        {"training_s": 1.0, "waiting_s": 0.5, "model_flops": 10.0, "trainer_rss_bytes": 7.0},
        {"training_s": 2.0, "export_s": 0.25, "model_flops": 30.0, "trainer_rss_bytes": 5.0},
    ]
    rows[1]["servers_serving"] = 2.0
    resources = RunResources()
    for row in rows:
        resources.add(row)
    assert resources.told(trainer_ranks=4) == {
        "trainer_ranks": 4,
        "rollout_servers": 2,
        "training_s": 3.0,
        "waiting_s": 0.5,
        "publish_s": 0.0,
        "export_s": 0.25,
        "model_flops": 40.0,
        "trainer_rss_bytes": 7.0,
    }


def test_a_run_without_a_step_took_nothing():
    found = RunResources().told(trainer_ranks=0)
    assert found["model_flops"] == pytest.approx(0)
    assert "trainer_rss_bytes" not in found
