"""Batches that the trainer cannot train: set aside by the run, by the user, and after a crash."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from slipstream.client.run_folder import hold_folder, write_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from slipstream.core.types import Trajectory
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import (
    Journal,
    read_batch,
    read_records,
)
from slipstream.learner.controller.set_aside_batch import set_batch_aside
from slipstream.learner.trainer.recorded_run import recorded_steps
from slipstream.v1 import trainer_pb2
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import START, FakeTrainer
from support.rigs.controller_runs import make_config, play
from support.rigs.run_processes import records_of, run_command

STEPS = 12
GROUPS = 4
MEMBERS = 4
TOKENS = 5

Poisoned = Callable[[list[Trajectory]], list[str] | None]
Failed = tuple[Config, FakeTrainer]


def group_of(number: int, *, named: bool = True) -> Poisoned:
    """Refuses batches with this group; names it, or no group."""

    def poisoned(batch: list[Trajectory]) -> list[str] | None:
        group_id = f"g{number:06d}"
        if all(trajectory.group_id != group_id for trajectory in batch):
            return None
        return [group_id] if named else []

    return poisoned


async def run(
    config: Config, poisoned: Poisoned, checkpoint=START
) -> tuple[dict, FakeTrainer]:
    trainer = FakeTrainer(
        config.controller.address, checkpoint=checkpoint, checkpoint_every=3
    )
    trainer.poisoned = poisoned
    fleet = [FakeServer(config.controller.address, f"s{i}") for i in range(2)]
    return await play(config, *fleet, trainer=trainer), trainer


def check_whole(config: Config, summary: dict, num_set_aside: int) -> None:
    """Every step is trained, and of `num_set_aside` groups all tokens are set aside."""
    assert (summary["state"], summary["steps"]) == ("finished", STEPS), summary["cause"]
    assert summary["ledger"]["trained"] == STEPS * GROUPS * MEMBERS * TOKENS
    assert summary["ledger"]["set_aside"] == num_set_aside * MEMBERS * TOKENS
    steps = list(recorded_steps(config.run_dir / "journal"))
    assert [s.header.step for s in steps] == list(range(STEPS))


def check_put_back(config: Config, record: dict) -> None:
    """The next batch of the step has the good groups of the first one, as they were."""
    history = read_history(read_records(config.run_dir / "journal"))
    (first,) = history.set_aside
    folder = config.run_dir / "journal"
    second = history.batches[record["step"]]
    assert (first.attempt, second.attempt) == (0, 1)
    group_ids = {group for group, *_ in record["put_back"]}
    before, after = (
        [
            trajectory
            for trajectory in read_batch(
                folder, b.step, b.crc32, b.attempt
            ).trajectories
            if trajectory.group_id in group_ids
        ]
        for b in (first, second)
    )
    assert len(before) == len(group_ids) * MEMBERS
    assert sorted(map(str, before)) == sorted(map(str, after))


async def test_a_run_trains_the_step_with_another_batch_and_keeps_the_good_groups(
    tmp_path, caplog
):
    config = make_config(tmp_path)
    summary, trainer = await run(config, group_of(9))
    check_whole(config, summary, num_set_aside=1)
    assert summary["set_aside_batches"] == 1
    (record,) = records_of(config.run_dir, "batch_set_aside")
    assert [g for g, *_ in record["groups"]] == ["g000009"]
    assert (record["by"], record["cause"]) == ("trainer", "the loss is nan")
    # The good groups of the batch are in the next one, which has another id.
    assert len(record["put_back"]) == GROUPS - 1
    check_put_back(config, record)
    assert trainer.refused == [record["batch_id"]]
    assert max(trainer.lags) <= 2
    (warning,) = [
        r.getMessage() for r in caplog.records if "set aside" in r.getMessage()
    ]
    assert warning.endswith(
        f"batch {record['batch_id']} of step {record['step'] + 1} is set aside: the loss is nan; "
        f"never trained: g000009 (environment e, task {record['groups'][0][2]}); its other 3 "
        "groups stay"
    )


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_without_a_name_all_groups_of_the_batch_are_set_aside(
    tmp_path, max_staleness
):
    config = make_config(tmp_path, algorithm__max_staleness=max_staleness)
    summary, trainer = await run(config, group_of(9, named=False))
    check_whole(config, summary, num_set_aside=GROUPS)
    assert max(trainer.lags) <= max_staleness


async def test_too_many_batches_in_a_row_fail_the_run_with_one_line(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path)
    summary, trainer = await run(config, lambda _: [])
    assert trainer.refused == ["b000000", "b000000-1", "b000000-2", "b000000-3"]
    assert summary["state"] == "failed"
    assert summary["cause"] == (
        "batch b000000-3 of step 1 cannot be trained: the loss is nan; "
        "controller.max_set_aside_batches = 3 allows no other one, 3 in a row were set aside "
        "before; batch b000000-3 of step 1 is trained first when the run goes on, unless "
        f"`slipstream set-aside {config.run_dir} 1` takes it out"
    )
    assert summary["ledger"]["set_aside"] == 3 * GROUPS * MEMBERS * TOKENS


@pytest.fixture(scope="module")
def failure(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FakeTrainer]:
    """A run that failed at a batch which is the last one in its journal, as earlier ones did."""
    folder = tmp_path_factory.mktemp("failure")
    config = make_config(folder, controller__max_set_aside_batches=0)
    summary, trainer = asyncio.run(run(config, group_of(17)))
    assert summary["state"] == "failed"
    return folder, trainer


@pytest.fixture
def failed_run(failure: tuple[Path, FakeTrainer], tmp_path: Path) -> Failed:
    folder, trainer = failure
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return make_config(tmp_path, controller__max_set_aside_batches=0), trainer


def anew(config: Config, **changes) -> Config:
    """The settings of the next start."""
    fresh = make_config(config.run.dir)
    return fresh.model_copy(
        update={"controller": fresh.controller.model_copy(update=changes)}
    )


async def test_a_run_that_failed_at_a_batch_goes_on_without_it(failed_run):
    config, before = failed_run
    (at,) = before.refused
    again = anew(config)
    summary, trainer = await run(again, group_of(17), before.newest_checkpoint)
    check_whole(again, summary, num_set_aside=1)
    assert trainer.refused == [at]


@pytest.mark.parametrize("groups", [[], ["g000017"]])
async def test_a_user_sets_the_batch_aside_at_which_a_run_fails(failed_run, groups):
    config, before = failed_run
    step = int(before.refused[0].removeprefix("b")) + 1
    set_aside = set_batch_aside(config.run_dir, step, groups)
    assert set_aside.describe().startswith(
        f"batch {before.refused[0]} of step {step} is set aside"
    )
    again = anew(config, max_set_aside_batches=0)
    summary, trainer = await run(again, group_of(17), before.newest_checkpoint)
    assert trainer.refused == []
    check_whole(again, summary, num_set_aside=len(groups) or GROUPS)
    (record,) = records_of(again.run_dir, "batch_set_aside")
    assert record["by"] == "user"
    check_put_back(again, record)


async def test_what_cannot_be_set_aside_is_refused_with_one_line(failed_run, tmp_path):
    config, before = failed_run
    run_dir = config.run_dir
    step = int(before.refused[0].removeprefix("b")) + 1
    records = list(read_records(run_dir / "journal"))
    covered = before.newest_checkpoint[0].step
    with pytest.raises(ConfigError) as trained:
        set_batch_aside(run_dir, covered)
    assert str(trained.value) == (
        f"step {covered} of {run_dir} is trained, which a checkpoint covers; only a batch from "
        f"which no version was made can be set aside, and the newest version is {step - 1}"
    )
    with pytest.raises(
        ConfigError,
        match=f"of step 99 that waits to be trained, only that of step {step} does$",
    ):
        set_batch_aside(run_dir, 99)
    with pytest.raises(ConfigError, match="has no group g000999; it has g0"):
        set_batch_aside(run_dir, step, ["g000999"])
    with (
        Journal(run_dir / "journal"),
        pytest.raises(ConfigError, match="is written by another controller"),
    ):
        set_batch_aside(run_dir, step)
    with pytest.raises(ConfigError, match="has no journal"):
        set_batch_aside(tmp_path / "none", 1)
    assert list(read_records(run_dir / "journal")) == records


async def test_any_failure_at_a_new_batch_names_the_way_past_it(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    class Failing(FakeTrainer):
        async def train(self) -> None:
            if self.version.step == 4:
                failure = trainer_pb2.TrainerFailure(
                    message="IndexError: no", final=True
                )
                await self.stub.ReportFailure(failure, timeout=60, metadata=self.epoch)

        async def report(self, report):
            if self.version.step == 5:
                self.stop_reason = "failed"
                return trainer_pb2.StepReceipt()
            return await super().report(report)

    trainer = Failing(config.controller.address)
    summary = await play(config, trainer=trainer)
    assert summary["cause"] == (
        "trainer rank 0: IndexError: no; batch b000004 of step 5 is trained first when the run "
        f"goes on, unless `slipstream set-aside {config.run_dir} 5` takes it out"
    )


async def test_a_batch_that_was_trained_before_is_not_set_aside(tmp_path: Path) -> None:
    config = make_config(tmp_path, controller__max_set_aside_batches=0)
    summary, _ = await run(config, group_of(29))
    assert summary["state"] == "failed"
    again = anew(config, max_set_aside_batches=3)
    # A trainer of the start trains all steps again, and fails at one that was made.
    summary, trainer = await run(again, group_of(5))
    (refused,) = trainer.refused
    step = int(refused.removeprefix("b")) + 1
    assert summary["cause"] == (
        f"step {step} was made from batch {refused} before, and cannot be made again: "
        "the loss is nan"
    )
    assert records_of(again.run_dir, "batch_set_aside") == []


async def test_the_command_takes_a_batch_out_of_a_run_that_has_ended(failed_run):
    config, before = failed_run
    run_dir = config.run_dir
    step = int(before.refused[0].removeprefix("b")) + 1
    write_config(config, run_dir)
    with hold_folder(run_dir, refusal="held"):
        alive = await asyncio.to_thread(run_command, "set-aside", run_dir, step)
    refusal = f"slipstream: {run_dir} is written by a run that goes on; end it first\n"
    assert (alive.returncode, alive.stdout, alive.stderr) == (2, "", refusal)
    missing = await asyncio.to_thread(
        run_command, "set-aside", run_dir, step, "--group", "g9"
    )
    assert (missing.returncode, missing.stdout) == (2, "")
    start = f"slipstream: batch {before.refused[0]} of step {step} has no group g9; it has g0"
    assert missing.stderr.startswith(start)
    assert records_of(config.run_dir, "batch_set_aside") == []
    done = await asyncio.to_thread(
        run_command, "set-aside", run_dir, step, "--group", "g000017"
    )
    assert done.returncode == 0, done.stderr
    assert "never trained: g000017 (environment e, task " in done.stdout
    assert done.stdout.endswith(
        "; run the command that started the run again: it trains another batch\n"
    )
    assert len(records_of(config.run_dir, "batch_set_aside")) == 1
