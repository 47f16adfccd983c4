"""Tasks of a whole run are drawn by their results, also behind a kill of the controller."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.references.drawn_tasks import drawn_tasks
from support.rigs.run_processes import (
    CONTROLLER,
    LONG_RUN,
    ROOT,
    check_replay,
    checked,
    command,
    kill,
    records_of,
    write_config,
)
from support.rigs.steps import until_row

from deploy.algorithms import task_weights

pytestmark = [*LONG_RUN, pytest.mark.timeout(900)]

LIMIT_S = 600.0
STEPS = 8
GROUPS = 8
WEIGHED = "weighed"


def trained_groups(run: Path) -> Iterator[tuple[str, int]]:
    """Yields the environment and the step of each trained group."""
    environments = {r["group"]: r["environment"] for r in records_of(run, "lease")}
    for record in records_of(run, "batch"):
        for group in record["groups"]:
            yield environments[group], record["step"]


async def test_tasks_are_drawn_by_results_and_environments_begin_by_turns(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    echo = {"reference": "slipstream.environments.echo:Echo", "timeout_s": 10.0}
    write_config(
        tmp_path,
        tiny_model,
        run__steps=STEPS,
        environments=[
            {"name": WEIGHED, **echo, "args": {"num_symbols": 6}},
            {"name": "plain", **echo, "args": {"num_symbols": 8}},
        ],
        evaluations=[],
        algorithm__group_size=4,
        algorithm__groups_per_step=GROUPS,
        extensions__task_weights__environments={
            WEIGHED: {
                "function": "deploy.algorithms.task_weights:half_solved",
                "pass_reward": 0.5,
            }
        },
    )
    async with command(tmp_path, "run", "config.toml", cwd=tmp_path) as run:
        await until_row(tmp_path, run, 3)
        (controller,) = run.find(CONTROLLER)
        kill(controller)
        assert await run.wait(LIMIT_S) == 0, run.out + run.err
    folder = tmp_path / "run"
    summary = checked(folder)
    assert (summary["state"], summary["steps"], summary["ledger"]["lost"]) == (
        "finished",
        STEPS,
        0,
    )
    draws = list(
        drawn_tasks(folder / "journal", WEIGHED, task_weights.half_solved, seed=1)
    )
    assert len(draws) >= STEPS * GROUPS // 2
    assert [task for task, _ in draws] == [expected for _, expected in draws]
    assert len(records_of(folder, "task_weights")) >= 3
    results = Counter(record["group"] for record in records_of(folder, "task_result"))
    assert set(results.values()) == {1}
    # The groups that are begun first are of both by turns, whichever loads or gets weights later.
    begun = [record["environment"] for record in records_of(folder, "lease")[:GROUPS]]
    assert abs(begun.count("plain") - begun.count(WEIGHED)) <= 1
    assert {environment for environment, _ in trained_groups(folder)} == {
        "plain",
        WEIGHED,
    }
    check_replay(folder)
