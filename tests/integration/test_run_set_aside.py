"""A whole run whose journal holds a batch that cannot be trained, as older versions took it."""

import dataclasses
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from slipstream.core.types import GroupId, PolicyVersion, VersionSpan  # noqa: E402
from slipstream.learner.controller.records.history import read_history  # noqa: E402
from slipstream.learner.controller.records.journal import Journal, read_records  # noqa: E402
from slipstream.learner.controller.trajectories.batch import (  # noqa: E402
    FormedBatch,
    from_record,
)
from support.rigs.run_processes import (  # noqa: E402
    check_ledger,
    copy_environments,
    run_command,
    summary_of,
    write_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

TRAINED, STEPS, GROUPS = 2, 4, 4
RUN_LIMIT_S = 400.0


def add_poisoned_batch(journal_folder: Path) -> str:
    """Journals a batch of the next step; the rewards of one group are 1e308 but for one."""
    history = read_history(read_records(journal_folder))
    newest = history.batches[TRAINED - 1]
    with Journal(journal_folder) as journal:
        good = from_record(journal.read_batch(newest.step, newest.crc32))
        groups = []
        for place, group in enumerate(good.groups):
            name = GroupId(f"g{history.next_group + place:06d}")
            for member, trajectory in group.finished.items():
                group.finished[member] = dataclasses.replace(
                    trajectory,
                    group_id=name,
                    version_spans=(
                        VersionSpan(trajectory.num_sampled_tokens, PolicyVersion(0, TRAINED)),
                    ),
                    reward=trajectory.reward if place else 1e308 if member else -1e308,
                )
            groups.append(dataclasses.replace(group, group_id=name))
            journal.append(
                "lease",
                group=name,
                server=group.finished[0].server_id,
                epoch=group.finished[0].server_epoch,
                environment=group.environment,
                number=history.environments[group.environment].next_number + place,
                task=group.task_index,
                seed=group.seed,
                deadline=TRAINED,
            )
        batch = FormedBatch(TRAINED, f"b{TRAINED:06d}", tuple(groups))
        journal.write_batch(batch.record)
    return groups[0].group_id


def check_done(run: Path, *, num_set_aside: int) -> None:
    summary = summary_of(run)
    assert (summary["state"], summary["steps"]) == ("finished", STEPS)
    assert summary["set_aside_batches"] == 1
    assert summary["ledger"]["set_aside"] > 0
    check_ledger(summary)
    history = read_history(read_records(run / "journal"))
    (aside,) = [r for r in read_records(run / "journal") if r["kind"] == "batch_set_aside"]
    assert len(aside["groups"]) == num_set_aside
    assert history.batches[TRAINED].batch_id == f"b{TRAINED:06d}-1"
    replay = run_command("replay", run, limit_s=RUN_LIMIT_S)
    assert replay.returncode == 0, replay.stdout + replay.stderr
    assert [line.split()[2] for line in replay.stdout.splitlines()] == [
        history.steps[step].digest for step in range(STEPS)
    ]


def test_a_run_with_a_batch_that_cannot_be_trained_goes_on(
    tmp_path: Path, tiny_model: Path
) -> None:
    folder = copy_environments(tmp_path / "one")
    settings = {"algorithm__group_size": 4, "algorithm__groups_per_step": GROUPS}
    write_config(folder, tiny_model, run__steps=TRAINED, evaluations=[], **settings)
    first = run_command("run", "config.toml", cwd=folder, limit_s=RUN_LIMIT_S)
    assert first.returncode == 0, first.stdout + first.stderr
    poisoned = add_poisoned_batch(folder / "run" / "journal")

    # The run fails, names the batch and the way past it, and fails the same again.
    goes_on = ("run", "config.toml", f"run.steps={STEPS}")
    for _ in range(2):
        failed = run_command(
            *goes_on, "controller.max_set_aside_batches=0", cwd=folder, limit_s=RUN_LIMIT_S
        )
        assert failed.returncode == 1, failed.stdout + failed.stderr
        assert "advantages are not finite, of rewards from -1e+308 to 1e+308" in failed.stderr
        assert f"`slipstream set-aside {folder / 'run'} {TRAINED + 1}` takes it" in failed.stderr
    other = tmp_path / "other"
    shutil.copytree(folder, other)

    by_itself = run_command(*goes_on, cwd=folder, limit_s=RUN_LIMIT_S)
    assert by_itself.returncode == 0, by_itself.stdout + by_itself.stderr
    assert f"never trained: {poisoned} (environment " in by_itself.stdout
    check_done(folder / "run", num_set_aside=1)

    write_config(other, tiny_model, run__steps=STEPS, evaluations=[], **settings)
    aside = run_command("set-aside", other / "run", TRAINED + 1)
    assert aside.returncode == 0, aside.stdout + aside.stderr
    assert aside.stdout.startswith(f"batch b{TRAINED:06d} of step {TRAINED + 1} is set aside: ")
    again = run_command("set-aside", other / "run", TRAINED + 1)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.splitlines() == [
        f"slipstream: {other / 'run'} has no batch of step {TRAINED + 1} that waits to be "
        "trained, none does"
    ]
    by_hand = run_command("run", "config.toml", cwd=other, limit_s=RUN_LIMIT_S)
    assert by_hand.returncode == 0, by_hand.stdout + by_hand.stderr
    check_done(other / "run", num_set_aside=GROUPS)
