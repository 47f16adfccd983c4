import dataclasses
from pathlib import Path

import numpy as np
import pytest
from slipstream.core.types import Branch, PolicyVersion, Status, Trajectory, VersionSpan
from slipstream.learner.controller.reporting.run_facts import RunTotals
from slipstream.learner.controller.trajectories.batch import FormedBatch, from_record
from slipstream.learner.controller.trajectories.batch_statistics import (
    HINT_AFTER_STEPS,
    LessonWatch,
    batch_statistics,
    environment_means,
    equal_rewards,
)
from slipstream.protocol.codec import trajectory_to_pb
from slipstream.v1 import trainer_pb2
from support.fakes.fake_trajectories import GOOD
from support.fakes.small_configs import config_of


def trajectory(reward: float, *run_lengths: int, **changes: object) -> Trajectory:
    sampled = sum(run_lengths[1::2])
    made: dict[str, object] = {
        "token_ids": np.zeros(sum(run_lengths), np.uint32),
        "run_lengths": run_lengths,
        "behavior_logprobs": np.zeros(sampled, np.float32),
        "version_spans": (VersionSpan(sampled, PolicyVersion(0, 0)),),
        "reward": reward,
        "num_turns": len(run_lengths) // 2,
    }
    return dataclasses.replace(GOOD, **(made | changes))


def batch_of(step: int, *trajectories: Trajectory) -> FormedBatch:
    members = [dataclasses.replace(t, member=n) for n, t in enumerate(trajectories)]
    message = trainer_pb2.RecordedBatch(
        header=trainer_pb2.BatchHeader(step=step, batch_id="b"),
        trajectories=[trajectory_to_pb(member) for member in members],
    )
    return from_record(message)


def test_rewards_lags_lengths_turns_and_times_of_a_batch():
    old, new = PolicyVersion(0, 1), PolicyVersion(0, 3)
    spans = (VersionSpan(6, old), VersionSpan(3, new))
    batch = batch_of(
        3,
        trajectory(1.0, 3, 5, 2, 4, generation_s=3.0, environment_s=0.5, version_spans=spans),
        trajectory(
            *(-2.0, 7, 1),
            status=Status.TRUNCATED,
            generation_s=1.0,
            version_spans=(VersionSpan(1, new),),
        ),
    )
    assert batch_statistics(batch) == {
        "reward_mean": -0.5,
        "reward_std": 1.5,
        "lag_mean": 1.2,
        "lag_max": 2.0,
        "trajectories_with_several_versions": 1.0,
        "num_tokens": 22.0,
        "reply_tokens_mean": 10 / 3,
        "reward_min": -2.0,
        "reward_max": 1.0,
        "prompt_tokens_mean": 5.0,
        "reply_tokens_max": 5.0,
        "episode_tokens_mean": 11.0,
        "episode_tokens_max": 14.0,
        "turns_mean": 1.5,
        "branches_mean": 1.0,
        "truncated_fraction": 0.5,
        "generation_s_mean": 2.0,
        "environment_s_mean": 0.25,
    }


def test_branches_are_counted_and_an_episode_without_any_is_one():
    tree = trajectory(0.0, 3, 5, 2, 4, 9, 1, branches=(Branch(4), Branch(2)))
    found = batch_statistics(batch_of(0, tree, trajectory(1.0, 1, 2)))
    assert found["branches_mean"] == 1.5
    assert (found["turns_mean"], found["episode_tokens_max"]) == (2.0, 24.0)


def test_each_environment_has_its_own_means():
    batch = [
        trajectory(1.0, 1, 1, metrics={"right": 1.0}),
        trajectory(0.0, 1, 1, metrics={"right": 0.0}),
        trajectory(5.0, 1, 1, environment="f"),
    ]
    assert environment_means(batch) == {"e/reward": 0.5, "e/right": 0.5, "f/reward": 5.0}


def test_rewards_of_the_first_turns_are_means_over_the_episodes_that_have_them():
    earned = np.array([0, 1, 0.5, -2], np.float32)
    batch = [
        trajectory(-0.5, 1, 2, 1, 1, 1, 1, token_rewards=earned),
        trajectory(3.0, 1, 2, 1, 1),
        trajectory(1.0, 1, 2),
        # Branches that share a reward have none of their own.
        trajectory(0.5, 1, 1, 1, 1, branches=(Branch(2), Branch(2))),
        trajectory(1.0, 1, 2, environment="f"),
        trajectory(1.0, *[1, 1] * 20, environment="g"),
    ]
    means = environment_means(batch)
    names = {name: mean for name, mean in means.items() if "turn_rewards" in name}
    assert {n: m for n, m in names.items() if n.startswith("e/")} == {
        "e/turn_rewards/1": 2 / 3,
        "e/turn_rewards/2": 1.75,
        "e/turn_rewards/3": -2.0,
    }
    assert [n for n in names if n[0] != "e"] == [f"g/turn_rewards/{n}" for n in range(1, 9)]


def test_the_rewards_of_named_branches_are_means_over_the_episodes_that_have_them():
    player, judge = Branch(2, name="player", reward=1.0), Branch(2, name="judge", reward=0.5)
    batch = [
        trajectory(0.0, 1, 1, 1, 1, 1, 1, branches=(player, judge, player)),
        trajectory(1.0, 1, 1, 1, 1, branches=(Branch(2, name="player", reward=0.0), Branch(2))),
    ]
    assert environment_means(batch) == {
        "e/branch_rewards/player": 0.5,
        "e/branch_rewards/judge": 0.5,
        "e/reward": 0.5,
    }
    many = tuple(Branch(2, name=f"b{n:02}", reward=1.0) for n in range(20))
    names = environment_means([trajectory(0.0, *[1, 1] * 20, branches=many)])
    assert set(names) == {"e/reward", *(f"e/branch_rewards/b{n:02}" for n in range(16))}


def test_what_is_counted_is_0_in_the_episodes_that_do_not_name_it():
    batch = [
        trajectory(1.0, 1, 1, metrics={"branches/edited": 3.0, "right": 1.0}),
        trajectory(0.0, 1, 1, metrics={"ignored/temperature": 4.0}),
    ]
    means = {"branches/edited": 1.5, "ignored/temperature": 2.0, "right": 1.0}
    assert environment_means(batch) == {f"e/{name}": mean for name, mean in means.items()} | {
        "e/reward": 0.5
    }


def test_groups_with_equal_rewards_are_counted_for_each_environment(tmp_path: Path):
    groups = [
        [trajectory(1.0, 1, 1), trajectory(0.0, 1, 1)],
        [trajectory(1.0, 1, 1), trajectory(1.0, 1, 1)],
        [trajectory(0.0, 1, 1, environment="f"), trajectory(0.0, 1, 1, environment="f")],
    ]
    assert equal_rewards(groups, config_of(tmp_path)) == {
        "equal_rewards_fraction": pytest.approx(2 / 3),
        "e/equal_rewards_fraction": 0.5,
        "f/equal_rewards_fraction": 1.0,
    }


def rows_of(*fractions: float | None) -> list[dict[str, float]]:
    """The steps' rows; None: a step without a group of the environment."""
    return [
        {} if value is None else {"e/equal_rewards_fraction": value, "e/reward": 0.25}
        for value in fractions
    ]


def test_an_environment_that_teaches_nothing_is_named_once(tmp_path: Path):
    config = config_of(tmp_path)
    rows = rows_of(0.5, *[1.0] * (HINT_AFTER_STEPS - 1), None, 1.0, 1.0)
    watch = LessonWatch(config)
    told = [watch.note(row) for row in rows]
    (hint,) = told[-2]
    assert hint.startswith("environment e has taught nothing for 10 steps: the rewards of each ")
    assert "(mean 0.25)" in hint
    assert [each for each in told if each] == [[hint]]


def test_it_is_named_again_when_it_had_taught_something_meanwhile(tmp_path: Path):
    rows = rows_of(*[1.0] * HINT_AFTER_STEPS, 0.9, *[1.0] * HINT_AFTER_STEPS)
    watch = LessonWatch(config_of(tmp_path))
    assert [len(watch.note(row)) for row in rows].count(1) == 2


@pytest.mark.parametrize("advantage", ["reinforce_pp", "gae"])
def test_equal_rewards_are_no_reason_to_speak_where_groups_are_not_compared(tmp_path, advantage):
    config = config_of(tmp_path)
    algorithm = config.algorithm.model_copy(update={"advantage": advantage})
    config = config.model_copy(update={"algorithm": algorithm})
    watch = LessonWatch(config)
    assert not any(watch.note(row) for row in rows_of(*[1.0] * HINT_AFTER_STEPS))


def test_resources_add_up_over_steps_and_peaks_are_the_largest():
    rows = [
        {"training_s": 1.0, "waiting_s": 0.5, "model_flops": 10.0, "trainer_rss_bytes": 7.0},
        {"training_s": 2.0, "export_s": 0.25, "model_flops": 30.0, "trainer_rss_bytes": 5.0},
    ]
    rows[1]["servers_serving"] = 2.0
    totals = RunTotals()
    for row in rows:
        totals.add(row)
    assert totals.resources(trainer_ranks=4) == {
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
    found = RunTotals().resources(trainer_ranks=0)
    assert found["model_flops"] == pytest.approx(0)
    assert "trainer_rss_bytes" not in found
