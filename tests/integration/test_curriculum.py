"""A whole run with a curriculum: what is chosen follows from the journal, and saves episodes."""

import json
from collections import Counter

from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import CurriculumSection
from slipstream.core.types import GroupId
from slipstream.learner.controller.records.journal import read_records
from slipstream.learner.controller.tasks.environments import EnvironmentBook
from slipstream.v1 import environment_pb2, trajectory_pb2
from support.fakes.fake_server import FakeServer
from support.rigs.controller_runs import make_config, play


def by_task(lease, member, attempt):
    """Tasks below 5 are always solved, the others by half of the members."""
    return 1.0 if lease.task_index < 5 else float(member % 2)


def with_curriculum(config: Config) -> Config:
    environment = config.environments[0].model_copy(update={"curriculum": CurriculumSection()})
    return config.model_copy(update={"environments": (environment,)})


def chosen_again(records: list[dict], config: Config) -> list[tuple[int, int]]:
    """The tasks that a book chooses at each lease from the results journaled before it."""
    curricula = {e.name: (e.curriculum, 1.0) for e in config.environments if e.curriculum}
    book = EnvironmentBook(seed=config.run.seed, max_failed_groups=3, curricula=curricula)
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


async def test_solved_tasks_are_seldom_drawn_and_every_choice_follows_from_the_journal(tmp_path):
    changes = {"run__steps": 12, "algorithm__filter": "unequal_rewards"}
    config = with_curriculum(make_config(tmp_path, **changes))
    server = FakeServer(config.controller.address, judge=by_task)
    summary = await play(config, server)
    assert summary["steps"] == 12
    assert summary["ledger"]["difference"] == 0
    records = list(read_records(config.run_dir / "journal"))
    leases = {r["group"]: (r["number"], r["task"]) for r in records if r["kind"] == "lease"}
    assert list(leases.values()) == chosen_again(records, config)
    # Without a curriculum half of all groups would be filtered.
    tasks = Counter(task for _, task in leases.values())
    assert sum(tasks[task] for task in range(5)) < len(leases) / 4
    assert summary["filtered_groups"] < len(leases) / 4
    rows = [*map(json.loads, (config.run_dir / "metrics.jsonl").read_text().splitlines())]
    last = rows[-1]
    # A task of one result is not solved yet.
    assert (last["e/tasks_solved"] + last["e/tasks_learning"], last["e/tasks_failed"]) == (10, 0)
    assert last["e/tasks_passed_over"] > 0
    chosen = [row["e/chosen_success"] for row in rows if "e/chosen_success" in row]
    assert min(chosen) == 0.5
