"""Dynamic sampling: groups with equal rewards are left out, and what becomes of the run then."""

import pytest
from slipstream.learner.controller.trajectories.intake import MOST_FILTERED_BATCHES
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config, play
from support.rigs.run_processes import records_of, rows_of

FILTER = {"algorithm__filter": "unequal_rewards"}


async def test_groups_with_equal_rewards_are_filtered_and_replaced(tmp_path):
    def by_group(lease, member, attempt):
        return 1.0 if int(lease.group_id[1:]) % 2 else float(member)

    config = make_config(tmp_path, run__steps=4, algorithm__filter="unequal_rewards")
    trainer = FakeTrainer(config.controller.address)
    server = FakeServer(config.controller.address, judge=by_group)
    summary = await play(config, server, trainer=trainer)
    assert summary["steps"] == 4
    assert summary["ledger"]["filtered"] > 0
    assert all(int(t.group_id[1:]) % 2 == 0 for batch in trainer.batches for t in batch)
    by_step = [
        row["filtered_groups"] for row in rows_of(config.run_dir) if "step" in row
    ]
    assert 0 < sum(by_step) <= summary["filtered_groups"]
    records = records_of(config.run_dir, "end")
    filtered = {r["id"].split(".")[0] for r in records if r.get("end") == "filtered"}
    assert len(filtered) == summary["filtered_groups"]


@pytest.mark.parametrize("reward", [0.25, 3.0])
async def test_a_run_whose_groups_all_fail_alike_stops_with_the_cause(reward, tmp_path):
    config = make_config(tmp_path, run__steps=3, **FILTER)
    server = FakeServer(
        config.controller.address, judge=lambda lease, member, attempt: reward
    )
    summary = await play(config, server)
    assert summary["code"] == 1
    limit = MOST_FILTERED_BATCHES * config.algorithm.groups_per_step
    assert summary["cause"].startswith(
        f"{limit} groups were left out by algorithm.filter while the batch of step 1 was formed"
    )
    assert f"(e: 0 of {limit} solved, mean reward {reward:g})" in summary["cause"]


async def test_a_run_whose_groups_teach_nothing_goes_on_and_its_rows_say_so(tmp_path):
    config = make_config(tmp_path)
    server = FakeServer(
        config.controller.address, judge=lambda lease, member, attempt: 0.25
    )
    summary = await play(config, server)
    assert summary["steps"] == 12
    assert {row["e/equal_rewards_fraction"] for row in rows_of(config.run_dir)} == {1.0}


async def test_a_run_whose_task_is_solved_stops_with_its_model(tmp_path):
    config = make_config(tmp_path, **FILTER)
    trainer = FakeTrainer(config.controller.address, step_s=0.02)

    def judge(lease, member, attempt):
        # Two batches and half of the third one teach something.
        return 1.0 if int(lease.group_id[1:]) >= 10 else float(member % 2)

    summary = await play(
        config, FakeServer(config.controller.address, judge=judge), trainer=trainer
    )
    assert (summary["code"], summary["state"], summary["steps"]) == (0, "stopped", 2)
    limit = MOST_FILTERED_BATCHES * config.algorithm.groups_per_step
    assert summary["cause"].startswith(
        f"the task is solved: the last {limit} groups were left out"
    )
    assert f"(e: {limit} of {limit} solved, mean reward 1)" in summary["cause"]
    assert trainer.stop_reason == summary["cause"]
