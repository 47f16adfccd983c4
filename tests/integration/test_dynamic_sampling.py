"""Dynamic sampling: groups with equal rewards are left out, and what becomes of the run then."""

import json

import pytest
from slipstream.client.run_folder import check_run_folder, write_config
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError
from slipstream.learner.controller.records.journal import read_records
from slipstream.learner.controller.trajectories.intake import MOST_FILTERED_BATCHES
from slipstream.v1.trajectory_pb2 import EPISODE_PURPOSE_EVALUATION
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import evaluation_rows, make_config, play
from support.rigs.waiting import until

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
    assert summary["ledger"]["difference"] == 0
    assert all(int(t.group_id[1:]) % 2 == 0 for batch in trainer.batches for t in batch)
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    by_step = [row["filtered_groups"] for row in map(json.loads, lines) if "step" in row]
    assert 0 < sum(by_step) <= summary["filtered_groups"]
    records = list(read_records(config.run_dir / "journal"))
    filtered = {r["id"].split(".")[0] for r in records if r.get("end") == "filtered"}
    assert len(filtered) == summary["filtered_groups"]


@pytest.mark.parametrize("reward", [0.25, 3.0])
async def test_a_run_whose_groups_all_fail_alike_stops_with_the_cause(reward, tmp_path):
    config = make_config(tmp_path, run__steps=3, **FILTER)
    server = FakeServer(config.controller.address, judge=lambda lease, member, attempt: reward)
    summary = await play(config, server)
    assert (summary["code"], summary["solved"]) == (1, False)
    limit = MOST_FILTERED_BATCHES * config.algorithm.groups_per_step
    assert summary["cause"].startswith(
        f"{limit} groups were left out by algorithm.filter while the batch of step 1 was formed"
    )
    assert f"(e: 0 of {limit} solved, mean reward {reward:g})" in summary["cause"]
    assert summary["ledger"]["difference"] == 0


async def test_a_run_whose_groups_teach_nothing_says_so_once(tmp_path, caplog):
    config = make_config(tmp_path)
    server = FakeServer(config.controller.address, judge=lambda lease, member, attempt: 0.25)
    with caplog.at_level("WARNING"):
        summary = await play(config, server)
    assert summary["steps"] == 12
    rows = map(json.loads, (config.run_dir / "metrics.jsonl").read_text().splitlines())
    assert {row["e/equal_rewards_fraction"] for row in rows} == {1.0}
    told = [message for message in caplog.messages if "taught nothing" in message]
    assert told == [
        "environment e has taught nothing for 10 steps: the rewards of each group were all equal "
        "(mean 0.25); it needs tasks of another difficulty, or rewards in between"
    ]


def solved_after(number: int):
    """Groups from `number` on have full rewards, those before have all there are."""

    def judge(lease, member, attempt):
        is_solved = lease.purpose == EPISODE_PURPOSE_EVALUATION or int(lease.group_id[1:]) >= number
        return 1.0 if is_solved else float(member % 2)

    return judge


def solving_config(tmp_path, **changes):
    evaluation = {"name": "held", "num_episodes": 4, "every_steps": 0}
    return make_config(tmp_path, evaluation, **FILTER, **changes)


async def test_a_run_whose_task_is_solved_finishes_early_with_its_last_evaluation(tmp_path):
    config = solving_config(tmp_path)
    trainer = FakeTrainer(config.controller.address, step_s=0.02)
    # Two batches and half of the third one.
    server = FakeServer(config.controller.address, judge=solved_after(10))
    summary = await play(config, server, trainer=trainer)
    assert (summary["code"], summary["state"], summary["solved"]) == (0, "finished", True)
    assert summary["steps"] == 2
    limit = MOST_FILTERED_BATCHES * config.algorithm.groups_per_step
    assert summary["cause"].startswith(f"the task is solved: the last {limit} groups were left out")
    assert f"(e: {limit} of {limit} solved, mean reward 1)" in summary["cause"]
    assert trainer.stop_reason == summary["cause"]
    assert [row["evaluation_step"] for row in evaluation_rows(config)] == [0, 2]
    assert trainer.published[-1].step == 2
    assert summary["ledger"]["difference"] == 0
    write_config(config, config.run_dir)
    (config.run_dir / "checkpoints" / "final").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is finished after 2 steps: the task is solved"):
        check_run_folder(config)


async def test_a_slow_trainer_does_not_make_a_task_solved(tmp_path):
    config = solving_config(tmp_path, run__steps=4, algorithm__groups_per_step=1)
    trainer = FakeTrainer(config.controller.address)
    # While the trainer stands still in the first step, all groups but each twelfth are filtered.
    trainer.gate.clear()

    def judge(lease, member, attempt):
        is_evaluated = lease.purpose == EPISODE_PURPOSE_EVALUATION
        is_equal = is_evaluated or int(lease.group_id[1:]) % 12
        return 1.0 if is_equal else float(member % 2)

    server = FakeServer(config.controller.address, judge=judge)

    async def until_many_are_filtered(controller, tasks):
        def filtered():
            records = read_records(config.run_dir / "journal")
            return sum(r["kind"] == "closed" and r["how"] == "filtered" for r in records)

        await until(lambda: filtered() > MOST_FILTERED_BATCHES)
        trainer.gate.set()

    summary = await play(config, server, trainer=trainer, during=until_many_are_filtered)
    assert (summary["code"], summary["solved"], summary["steps"]) == (0, False, 4)


async def test_a_solved_run_that_was_killed_before_its_end_only_ends(tmp_path):
    config = solving_config(tmp_path)
    first = FakeTrainer(config.controller.address)
    server = FakeServer(config.controller.address, judge=solved_after(8))
    await play(config, server, trainer=first)
    (config.run_dir / "summary.json").unlink()
    journal = config.run_dir / "journal" / "journal.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    # The controller may know that the run is solved before the last step is reported.
    kinds = (b'"kind":"solved"', b'"kind":"step"')
    last = max(i for i, line in enumerate(lines) if any(kind in line for kind in kinds))
    journal.write_bytes(b"".join(lines[: last + 1]))

    again = FakeTrainer(config.controller.address, checkpoint=(first.version, first.digest))
    server = FakeServer(config.controller.address, judge=solved_after(8))
    summary = await play(config, server, trainer=again)
    assert (summary["code"], summary["solved"], summary["steps"]) == (0, True, 2)
    assert not again.batches
    assert all(lease.purpose == EPISODE_PURPOSE_EVALUATION for lease in server.leases)
    assert [row["evaluation_step"] for row in evaluation_rows(config)][-1] == 2


async def test_a_solved_run_goes_on_without_the_filter(tmp_path):
    config = solving_config(tmp_path, run__steps=4)
    first = FakeTrainer(config.controller.address)
    server = FakeServer(config.controller.address, judge=solved_after(8))
    await play(config, server, trainer=first)
    write_config(config, config.run_dir)
    table = config.model_dump(mode="json", exclude_none=True)
    table["algorithm"]["filter"] = "none"
    config = parse_config(table, source="test")
    assert check_run_folder(config)
    again = FakeTrainer(config.controller.address, checkpoint=(first.version, first.digest))
    summary = await play(config, trainer=again)
    assert (summary["code"], summary["solved"], summary["steps"]) == (0, False, 4)
