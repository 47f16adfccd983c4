"""A whole run with a curriculum: what is chosen follows from the journal, and saves episodes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from slipstream.core.settings.config import Config
from slipstream.core.settings.curriculum_section import CurriculumSection
from slipstream.core.types import GroupId
from slipstream.learner.controller.records.journal import read_records
from slipstream.learner.controller.tasks.environments import EnvironmentBook
from slipstream.learner.controller.tasks.own_choice import own_choices
from slipstream.v1 import environment_pb2, trajectory_pb2
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config, play

FOLDER = str(Path(__file__).parents[1] / "support" / "fakes")


def by_task(lease, member, attempt):
    """Tasks below 5 are always solved, the others by half of the members."""
    return 1.0 if lease.task_index < 5 else float(member % 2)


def with_curriculum(config: Config, **settings) -> Config:
    section = CurriculumSection.model_validate(settings)
    environment = config.environments[0].model_copy(update={"curriculum": section})
    return config.model_copy(update={"environments": (environment,)})


def chosen_again(records: list[dict], config: Config) -> list[tuple[int, int]]:
    """The tasks that a book chooses at each lease from the results journaled before it."""
    curricula = {e.name: e.curriculum for e in config.environments if e.curriculum}
    book = EnvironmentBook(
        seed=config.run.seed,
        max_failed_groups=3,
        curricula=curricula,
        choosers=own_choices(curricula, search_path=FOLDER),
    )
    purpose = trajectory_pb2.EPISODE_PURPOSE_TRAINING
    entry = book.add(environment_pb2.EnvironmentSpec(name="e", weight=1.0, purpose=purpose))
    book.loaded("e", None, 10)  # type: ignore[arg-type]
    found, leased = [], set()
    for record in records:
        if record["kind"] == "result":
            book.has_result(GroupId(record["group"]), "e", record["task"], record["reward"])
        elif record["kind"] == "lease" and record["group"] not in leased:
            leased.add(record["group"])
            task_index, _ = book.next_task(entry)
            found.append((entry.next_number - 1, task_index))
    return found


async def test_tasks_that_are_solved_are_passed_over_and_every_choice_follows_from_the_journal(
    tmp_path,
):
    changes = {"run__steps": 12, "algorithm__dynamic_sampling": {"enabled": True}}
    config = with_curriculum(
        make_config(tmp_path, **changes), rule="skip", window=1, every_rounds=50
    )
    server = FakeServer(config.controller.address, judge=by_task)
    summary = await play(config, server, trainer=FakeTrainer(config.controller.address))
    assert summary["steps"] == 12
    assert summary["ledger"]["difference"] == 0
    records = list(read_records(config.run_dir / "journal"))
    leases = {r["group"]: (r["number"], r["task"]) for r in records if r["kind"] == "lease"}
    assert list(leases.values()) == chosen_again(records, config)
    # Without a curriculum half of all groups would be filtered.
    tasks = Counter(task for _, task in leases.values())
    assert sum(tasks[task] for task in range(5)) <= 10
    assert summary["filtered_groups"] <= 10
    rows = [*map(json.loads, (config.run_dir / "metrics.jsonl").read_text().splitlines())]
    last = rows[-1]
    assert (last["e/tasks_solved"], last["e/tasks_failed"]) == (5, 0)
    assert last["e/tasks_passed_over"] > 0
    chosen = [row["e/chosen_success"] for row in rows if "e/chosen_success" in row]
    assert set(chosen) == {0.5}


async def test_a_class_of_the_user_chooses_from_what_the_journal_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDER)
    chooser = "task_choosers:NearestToHalf"
    config = with_curriculum(make_config(tmp_path), rule="own", chooser=chooser)
    server = FakeServer(config.controller.address, judge=by_task)
    summary = await play(config, server, trainer=FakeTrainer(config.controller.address))
    assert (summary["steps"], summary["ledger"]["difference"]) == (12, 0)
    records = list(read_records(config.run_dir / "journal"))
    leases = {r["group"]: (r["number"], r["task"]) for r in records if r["kind"] == "lease"}
    assert list(leases.values()) == chosen_again(records, config)
    # Once each task has a result, only such as half of the members solve come.
    tried = {r["task"] for r in records if r["kind"] == "result"}
    assert tried == set(range(10))
    assert {task for _, task in list(leases.values())[-10:]} <= set(range(5, 10))


async def test_an_environment_whose_class_fails_is_suspended_and_the_others_go_on(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(FOLDER)
    config = with_curriculum(
        make_config(tmp_path, run__steps=6),
        rule="own",
        chooser="task_choosers:Odd",
        args={"what": "raise", "after": 9},
    )
    other = config.environments[0].model_copy(update={"name": "f", "curriculum": None})
    config = config.model_copy(update={"environments": (*config.environments, other)})
    server = FakeServer(config.controller.address)
    summary = await play(config, server, trainer=FakeTrainer(config.controller.address))
    assert (summary["steps"], summary["state"]) == (6, "finished")
    assert summary["ledger"]["difference"] == 0
    cause = "task_choosers:Odd failed: KeyError: 'no such task'"
    suspended = summary["suspended_environments"]
    assert [*suspended] == ["e"]
    assert suspended["e"].startswith(f"{cause} (task_choosers.py:")
    records = list(read_records(config.run_dir / "journal"))
    leased = [r["environment"] for r in records if r["kind"] == "lease"]
    assert leased.count("e") == 9


async def test_a_run_whose_only_environment_has_no_choice_left_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDER)
    config = with_curriculum(
        make_config(tmp_path), rule="own", chooser="task_choosers:Odd", args={"what": "outside"}
    )
    server = FakeServer(config.controller.address)
    trainer = FakeTrainer(config.controller.address)
    summary = await play(config, server, trainer=trainer, wait_for_trainer=False)
    assert summary["state"] == "failed"
    assert "task_choosers:Odd must choose a task from 0 to 9, got 10" in summary["cause"]
