"""Files of a run that are damaged, vanish or find no room while a controller writes them."""

import asyncio
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from slipstream.core.errors import ConfigError, ProtocolError, RunFailed
from slipstream.core.settings.config import Config
from slipstream.learner.controller import application
from slipstream.learner.controller.application import Controller
from slipstream.learner.controller.records.journal import encoded
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.fakes.named_channel import OPEN
from support.fakes.small_checkpoints import save_checkpoint
from support.rigs.controller_runs import make_config, play
from support.rigs.small_disks import small_disk
from support.rigs.waiting import LIMIT_S, until

STEPS = 6


def steps_in(path: Path) -> list[int]:
    """The steps of all lines but damaged ones."""
    rows = [
        json.loads(line) for line in path.read_text().splitlines() if "\0" not in line
    ]
    return [int(row["step"]) for row in rows if "step" in row]


@pytest.mark.parametrize("damage", ["missing", "damaged"])
async def test_what_decides_nothing_may_be_lost_between_two_starts(
    tmp_path, caplog, damage
):
    config = make_config(tmp_path, run__steps=STEPS, controller__sample_every_steps=1)
    trainer = FakeTrainer(config.controller.address)
    trainer.hold_at(STEPS - 1)

    async def stop(controller: Controller, tasks: list) -> None:
        await asyncio.wait_for(trainer.until_held(), LIMIT_S)
        controller.stop("a test")
        trainer.gate.set()

    assert (await play(config, trainer=trainer, during=stop))["code"] == 0
    for name in ("metrics.jsonl", "trajectories.jsonl", "summary.json"):
        path = config.run_dir / name
        data = path.read_bytes()
        path.unlink()
        if damage == "damaged":
            path.write_bytes(
                data[: len(data) // 2] + bytes(512) + data[len(data) // 2 :]
            )
    with caplog.at_level(logging.WARNING):
        summary = await play(config, is_damaged=True)
    assert (summary["code"], summary["steps"], summary["state"]) == (
        0,
        STEPS,
        "finished",
    )
    assert summary["ledger"]["difference"] == 0
    assert sum(summary["tokens_by_lag"].values()) == summary["ledger"]["trained"]
    # A step that was trained again has its line again.
    assert sorted(steps_in(config.run_dir / "metrics.jsonl")) == list(
        range(1, STEPS + 1)
    )
    messages = [m for m in caplog.messages if "such lines are passed over" in m]
    assert len(messages) == (damage == "damaged")
    assert not [r for r in caplog.records if r.exc_info]


async def again_from_the_start(config: Config, spoil) -> tuple[str, int]:
    """The cause and exit code of a run whose second trainer needs a batch that `spoil` spoils."""
    address = config.controller.address
    first = FakeTrainer(address)
    second = FakeTrainer(address)
    first.hold_at(3)
    second.hold_at(0)

    async def die(controller: Controller, tasks: list) -> None:
        await asyncio.wait_for(first.until_held(), LIMIT_S)
        first.place.cancel()
        tasks.append(asyncio.ensure_future(second.run()))
        await until(lambda: second.holds)
        # The trainer trains batch 0 again, and has not asked for the next one.
        spoil(config.run_dir / "journal" / "batches" / "step-000001.pb")
        second.gate.set()

    summary = await play(
        config, trainer=first, during=die, wait_for_trainer=False, is_damaged=True
    )
    return second.stop_reason, summary["code"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (Path.unlink, "cannot be read: No such file or directory"),
        (flip, "is damaged: the checksum of a record is wrong"),
    ],
    ids=["missing", "flipped"],
)
async def test_a_batch_that_is_lost_when_it_is_asked_for_fails_the_run_until_it_is_back(
    tmp_path, caplog, spoil, cause
):
    config = make_config(tmp_path, run__steps=STEPS)
    batch = config.run_dir / "journal" / "batches" / "step-000001.pb"
    copy = tmp_path / "kept.pb"

    def keep_and_spoil(path: Path) -> None:
        shutil.copy(path, copy)
        spoil(path)

    with caplog.at_level(logging.ERROR):
        reason, code = await again_from_the_start(config, keep_and_spoil)
    assert code == 1
    line = f"{batch} {cause}; put it back from a copy of the run, or begin anew with another"
    assert reason.startswith(line)
    assert [m for m in caplog.messages if m.startswith(f"the run failed: {line}")]
    assert not [r for r in caplog.records if r.exc_info]
    shutil.copy(copy, batch)
    summary = await play(config)
    assert (summary["code"], summary["steps"], summary["state"]) == (
        0,
        STEPS,
        "finished",
    )


async def test_a_trainer_that_needs_a_batch_that_is_gone_is_told_which_file(
    tmp_path, caplog
):
    config = make_config(tmp_path, run__steps=STEPS)
    address = config.controller.address
    trainer = FakeTrainer(address)
    await play(config, trainer=trainer)
    batch = config.run_dir / "journal" / "batches" / "step-000001.pb"
    batch.unlink()
    controller = Controller(config, OPEN)
    running = asyncio.ensure_future(controller.run())
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await FakeTrainer(address).run()
        line = caught.value.details()
        assert line.startswith(
            f"{batch} is missing; put it back from a copy of the run"
        )
        assert line.endswith("a trainer of version 0 cannot go on")
        assert "\n" not in line
        controller.stop("a test")
        assert await asyncio.wait_for(running, LIMIT_S) == 0
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("version", "lost", "cause"),
    [
        (1, "batch", "journal/batches/step-000005.pb is of step 6"),
        (STEPS, "step", "checkpoints/step-000006 is of version 6"),
        (1, "step", ""),
    ],
)
async def test_a_journal_that_lost_whole_lines_at_its_end_is_refused(
    tmp_path, version, lost, cause
):
    config = make_config(tmp_path, run__steps=STEPS)
    await play(config)
    folder = config.run_dir
    log = config.run_dir / "journal" / "journal.log"
    save_checkpoint(folder / "checkpoints", version)
    # The last record of the kind goes, with all lines behind it; where batches are newer too, two.
    lines = log.read_bytes().splitlines(keepends=True)
    places = [
        number
        for number, line in enumerate(lines)
        if f'"kind":"{lost}"'.encode() in line
    ]
    log.write_bytes(b"".join(lines[: places[-2 if lost == "batch" else -1]]))
    if not cause:
        summary = await play(config, is_damaged=True)
        assert (summary["steps"], summary["ledger"]["difference"]) == (STEPS, 0)
        return
    with pytest.raises(ConfigError) as caught:
        await Controller(config, OPEN).run()
    ends = "holds 4 batches" if lost == "batch" else "ends at version 5"
    assert str(caught.value) == (
        f"{folder / cause}, but {log} {ends}: lines at its end are lost; put it back from a copy "
        "of the run, or begin anew with another run.name"
    )


async def test_a_start_that_is_refused_keeps_the_models_of_earlier_ends(tmp_path):
    config = make_config(tmp_path, run__steps=STEPS)
    await play(config)
    folder = config.run_dir / "checkpoints"
    for name in ("final", "final-earlier"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model").write_text(name)
    log = config.run_dir / "journal" / "journal.log"
    lines = log.read_bytes()
    log.write_bytes(lines + encoded(lines.count(b"\n") + 1, {"kind": "weather"}))
    with pytest.raises(ProtocolError, match="a record 'weather' is not known"):
        await Controller(config, OPEN).run()
    assert [
        (folder / name / "model").read_text() for name in ("final", "final-earlier")
    ] == [
        "final",
        "final-earlier",
    ]
    log.write_bytes(lines)
    await play(config, is_damaged=True)
    assert not (folder / "final").exists()
    assert (folder / "final-earlier" / "model").read_text() == "final"


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=1m") as folder:
        yield folder


def fill(disk: Path) -> Path:
    path = disk / "filling"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    return path


async def test_a_full_disk_costs_lines_of_results_alone(tmp_path, caplog, disk):
    config = make_config(tmp_path, run__steps=STEPS, controller__sample_every_steps=1)
    folder = config.run_dir
    folder.mkdir()
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        (folder / name).symlink_to(disk / name)
    trainer = FakeTrainer(config.controller.address)
    trainer.hold_at(2)

    async def fill_in_the_middle(controller: Controller, tasks: list) -> None:
        await asyncio.wait_for(trainer.until_held(), LIMIT_S)
        fill(disk)
        trainer.gate.set()

    with caplog.at_level(logging.WARNING):
        summary = await play(
            config, trainer=trainer, during=fill_in_the_middle, is_damaged=True
        )
    assert (summary["code"], summary["steps"]) == (0, STEPS)
    assert summary["ledger"]["difference"] == 0
    assert not [r for r in caplog.records if r.exc_info]
    full = [m for m in caplog.messages if "No space left" in m]
    assert len(full) == 2
    messages = [m for m in caplog.messages if "were lost" in m]
    assert len(messages) == 2
    steps = steps_in(folder / "metrics.jsonl")
    assert 2 <= len(steps) < STEPS
    (message,) = [m for m in messages if "metrics.jsonl" in m]
    assert (
        message
        == f"{folder / 'metrics.jsonl'}: the last {STEPS - len(steps)} records were lost"
    )


async def test_a_run_on_a_full_disk_fails_in_one_line_and_goes_on_with_room(
    tmp_path, caplog, disk, monkeypatch
):
    config = make_config(disk, run__steps=STEPS, controller__sample_every_steps=1)
    server = FakeServer(config.controller.address)
    trainer = FakeTrainer(config.controller.address)
    trainer.hold_at(2)
    # A trajectory that the server has may never be journaled: it is waited for in vain.
    monkeypatch.setattr(application, "DRAIN_LIMIT_S", 1.0)
    controller = Controller(config, OPEN)
    running = asyncio.ensure_future(controller.run())
    tasks = [asyncio.ensure_future(server.run()), asyncio.ensure_future(trainer.run())]
    try:
        await asyncio.wait_for(trainer.until_held(), LIMIT_S)
        filling = fill(disk)
        trainer.gate.set()
        with caplog.at_level(logging.WARNING):
            async with asyncio.timeout(100):
                # The run fails with one line.
                with pytest.raises(
                    RunFailed, match="make room and run the same command again"
                ):
                    await running
    finally:
        for task in (running, *tasks):
            task.cancel()
        await asyncio.gather(running, *tasks, return_exceptions=True)
    assert not [r for r in caplog.records if r.exc_info]
    (failed,) = [m for m in caplog.messages if m.startswith("the run failed")]
    assert "No space left on device; make room and run the same command again" in failed
    assert not (config.run_dir / "summary.json").exists()
    filling.unlink()
    summary = await play(config)
    assert (summary["code"], summary["steps"]) == (0, STEPS)
    assert summary["ledger"]["trained"] == STEPS * 16 * 5
