"""The controller goes on from what a crash left, with servers and a trainer that compute nothing.

A crash is a copy of the run's folder, made in the middle of a run: what a controller that is killed
at that moment leaves on the disk.
"""

import asyncio
import random
import shutil
from pathlib import Path

import pytest
import redis.asyncio
from slipstream.client import Client
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import RunFailed
from slipstream.core.machine.address import free_port
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.extensions.redis.queue import RedisSender
from slipstream.extensions.redis.receiver import CONSUMER, GROUP
from slipstream.learner.controller.application import Controller
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.servers.fleet import Fleet
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import START, FakeTrainer
from support.fakes.named_channel import OPEN
from support.rigs.controller_runs import make_config, play
from support.rigs.journal_notes import note
from support.rigs.run_processes import records_of, rows_of
from support.rigs.valkey import EmbeddedServer
from support.rigs.waiting import LIMIT_S, until

STEPS = 12
GROUPS = 4
MEMBERS = 4


class Crashes:
    """Copies of a run at random moments, each with the newest checkpoint of then.

    A moment is shorter than two steps: however slow the machine, there is a copy of every third.
    """

    def __init__(
        self, config: Config, trainer: FakeTrainer, folder: Path, seed: int
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.folder = folder
        self.random = random.Random(seed)
        self.found = []

    async def watch(self, controller, tasks) -> None:
        while self.trainer.version.step < STEPS - 1:
            await asyncio.sleep(self.random.uniform(0.0, 2 * self.trainer.step_s))
            # On a busy machine the run may be over by now: that would be no crash.
            if self.trainer.version.step >= STEPS - 1:
                return
            if (self.config.run_dir / "journal" / "journal.log").exists():
                copy = self.folder / f"crash-{len(self.found)}"
                copy_run(self.config, copy)
                self.found.append((copy, self.trainer.newest_checkpoint))


def copy_run(config: Config, folder: Path) -> None:
    # A thread may be about to rename one of these.
    partial = shutil.ignore_patterns("*.partial")
    shutil.copytree(config.run_dir, folder / "r", ignore=partial)


def moved(config: Config, folder: Path, **run) -> Config:
    """The same settings for a copy of the run."""
    table = config.model_dump(mode="json", exclude_none=True)
    table["run"] |= {"dir": str(folder), **run}
    table["controller"]["address"] = f"127.0.0.1:{free_port('127.0.0.1')}"
    return parse_config(table, source="test")


def check_run(config: Config, summary: dict) -> list[dict]:
    """Every step is trained, and no task of an environment is dealt twice; returns the records."""
    assert (summary["code"], summary["state"], summary["steps"]) == (
        0,
        "finished",
        STEPS,
    )
    records = records_of(config.run_dir)
    leases = [r for r in records if r["kind"] == "lease"]
    # A group that is leased again has no number of its own.
    dealt = [(r["environment"], r["number"]) for r in leases if r["number"] >= 0]
    assert len(set(dealt)) == len(dealt)
    return records


def digests(records: list[dict]) -> list[str]:
    return [r["digest"] for r in records if r["kind"] == "step"]


async def crash(config: Config, folder: Path, seed: int, **server):
    address = config.controller.address
    trainer = FakeTrainer(address, step_s=0.05, checkpoint_every=3)
    crashes = Crashes(config, trainer, folder, seed)
    fleet = [FakeServer(address, f"s{i}", delay_s=0.03, **server) for i in range(2)]
    summary = await play(config, *fleet, trainer=trainer, during=crashes.watch)
    return check_run(config, summary), crashes.found


async def resume(config: Config, checkpoint=START, noise=b"", **server):
    address = config.controller.address
    trainer = FakeTrainer(address, checkpoint=checkpoint)
    trainer.noise = noise
    fleet = [FakeServer(address, f"s{i}", **server) for i in range(2)]
    return await play(config, *fleet, trainer=trainer), trainer, fleet


async def test_without_staleness_a_resumed_run_ends_with_the_digest_of_an_uninterrupted_one(
    tmp_path,
):
    config = make_config(tmp_path / "whole", algorithm__max_staleness=0)
    whole, crashes = await crash(config, tmp_path, seed=0)
    for folder, checkpoint in random.Random(1).sample(crashes, 3):
        again = moved(config, folder)
        before = digests(records_of(again.run_dir))
        summary, trainer, _ = await resume(again, checkpoint)
        records = check_run(again, summary)
        assert digests(records) == digests(whole)
        assert digests(records)[: len(before)] == before
        assert trainer.digest.hex() == digests(whole)[-1]
        assert summary["weight_digest"] == digests(whole)[-1]
        assert {tuple(r["version"])[0] for r in records if r["kind"] == "step"} == {0}


async def test_a_step_that_comes_out_different_begins_a_new_timeline(tmp_path):
    config = make_config(tmp_path / "whole")
    address = config.controller.address
    folder = tmp_path / "crash"
    trainer = FakeTrainer(address, checkpoint_every=3)
    trainer.hold_at(5)
    left = []

    async def crash_behind_a_checkpoint(controller, tasks):
        await trainer.until_held()
        copy_run(config, folder)
        left.append(trainer.newest_checkpoint)
        controller.stop("its disk is as a crash left it")
        trainer.gate.set()

    server = FakeServer(address, "s0")
    await play(config, server, trainer=trainer, during=crash_behind_a_checkpoint)
    again, (checkpoint,) = moved(config, folder), left
    steps = [r["step"] for r in records_of(again.run_dir, "step")]
    assert steps[-1] >= checkpoint[0].step == 3
    summary, trainer, fleet = await resume(again, checkpoint, noise=b"rounding")
    records = check_run(again, summary)
    assert trainer.version == PolicyVersion(1, STEPS)
    # No server is sent weights of the abandoned timeline.
    assert all(
        version.incarnation == 1
        for server in fleet
        for version in server.loaded_versions
    )
    first = [r["version"] for r in records if r["kind"] == "step"]
    assert [1, checkpoint[0].step + 1] in first


async def test_a_run_that_was_stopped_goes_on_with_more_steps_and_what_was_submitted(
    tmp_path,
):
    config = make_config(tmp_path, run__steps=5)
    trainer = FakeTrainer(config.controller.address, step_s=0.05, checkpoint_every=1)
    trainer.hold_at(2)

    async def submit_and_stop(controller, tasks):
        await trainer.until_held()
        async with Client(config.controller.address) as client:
            await client.submit("m:F", name="submitted")
        trainer.gate.set()
        await until(lambda: trainer.version.step >= 3)
        controller.stop("enough for today")

    summary = await play(config, trainer=trainer, during=submit_and_stop)
    stopped_at = trainer.version.step
    assert summary["steps"] == stopped_at < 5
    again = moved(config, tmp_path, steps=STEPS)
    summary, trainer, fleet = await resume(again, trainer.newest_checkpoint)
    check_run(again, summary)
    assert len(trainer.batches) == STEPS - stopped_at
    assert {lease.environment for server in fleet for lease in server.leases} == {
        "e",
        "submitted",
    }
    # The rows of both starts count.
    shares = summary["time"]["trainer"]
    rows = rows_of(again.run_dir)
    waited_s, all_s = (
        sum(row[name] for row in rows) for name in ("groups_wait_s", "step_s")
    )
    assert len(rows) == STEPS
    assert shares["waiting for groups"] == pytest.approx(waited_s / all_s)


async def test_what_a_crash_left_unacknowledged_in_redis_is_trained_once(tmp_path):
    """Delivered to a controller that died before it could acknowledge, and sent twice, too."""
    users = {"administrator": "~* &* +@all"}
    async with EmbeddedServer(tmp_path / "valkey", users) as redis_server:
        url = redis_server.url("administrator")
        queue = {"queue__kind": "redis", "queue__redis_url": url}
        config = make_config(tmp_path / "whole", **queue)
        address = config.controller.address
        trainer = FakeTrainer(address, step_s=0.02, checkpoint_every=2)
        fleet = FakeServer(address, "s0", delay_s=0.02, queue_url=url)
        crashed = tmp_path / "crash"
        left = []

        def is_left() -> bool:
            """Whether a copy of the run lacks a batch for something that was delivered."""
            shutil.rmtree(crashed, ignore_errors=True)
            copy_run(config, crashed)
            batched = {
                g for r in records_of(crashed / "r", "batch") for g in r["groups"]
            }
            delivered = fleet.delivered.copy()
            held = {name for name, _ in delivered if name.split(".")[0] not in batched}
            left[:] = [delivered, trainer.newest_checkpoint, held]
            return bool(batched and held)

        async def crash_and_stop(controller, tasks):
            await until(lambda: trainer.version.step >= 6 and is_left())
            controller.stop("its disk is as a crash left it")

        await play(config, fleet, trainer=trainer, during=crash_and_stop)
        delivered, checkpoint, held = left
        stream = f"slipstream:{fleet.run_id}:trajectories"
        async with (
            RedisSender(url, fleet.run_id, 1 << 26) as sender,
            redis.asyncio.Redis.from_url(url) as client,
        ):
            for trajectory_id, data in [*delivered, *delivered]:
                await sender.put(trajectory_id, data, timeout_s=LIMIT_S)
            await client.xreadgroup(GROUP, CONSUMER, {stream: ">"}, count=10_000)
            assert (await client.xpending(stream, GROUP))["pending"] == 2 * len(
                delivered
            )

            again = moved(config, crashed)
            resumed = FakeTrainer(again.controller.address, checkpoint=checkpoint)
            server = FakeServer(again.controller.address, "s0", queue_url=url)
            summary = await play(again, server, trainer=resumed)
            check_run(again, summary)
            assert await client.xlen(stream) == 0
        assert {t.trajectory_id for batch in resumed.batches for t in batch} & held


async def test_a_run_whose_redis_lost_data_ends_with_one_line_and_generates_again(
    tmp_path, caplog
):
    users = {"administrator": "~* &* +@all"}
    async with EmbeddedServer(tmp_path / "valkey", users) as redis_server:
        url = redis_server.url("administrator")
        config = make_config(tmp_path, queue__kind="redis", queue__redis_url=url)
        address = config.controller.address
        trainer = FakeTrainer(address, step_s=0.02, checkpoint_every=2)
        fleet = FakeServer(address, "s0", delay_s=0.02, queue_url=url)
        # A trajectory that it holds when the controller has ended is taken by nobody.
        fleet.put_limit_s = 10.0

        async def lose_data(controller, tasks):
            await until(lambda: trainer.version.step >= 6)
            async with redis.asyncio.Redis.from_url(url) as client:
                # A server that drops transactions as it loads keeps the count of bytes.
                assert await client.delete(f"slipstream:{fleet.run_id}:trajectories")

        with pytest.raises(BaseExceptionGroup) as caught:
            await play(config, fleet, trainer=trainer, during=lose_data)
        (cause,) = {str(error) for error in leaves(caught.value)}
        assert cause.startswith(
            f"redis at {redis_server.address} lost data of run {fleet.run_id}"
        )
        assert cause.endswith(
            "start the run again: it generates lost trajectories again"
        )

        again = moved(config, tmp_path)
        resumed = FakeTrainer(
            again.controller.address, checkpoint=trainer.newest_checkpoint
        )
        server = FakeServer(again.controller.address, "s0", queue_url=url)
        summary = await play(again, server, trainer=resumed)
        records = check_run(again, summary)
    assert [record["added"] for record in records if record["kind"] == "queue"] == [
        0,
        0,
    ]
    assert "the queue lost what waited there; it is generated again" in caplog.text


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for exception in error.exceptions for leaf in leaves(exception)]
    return [error]


async def test_a_controller_is_fenced_by_a_later_one_that_sees_no_lock(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    config = make_config(tmp_path, run__steps=STEPS)
    trainer = FakeTrainer(config.controller.address)
    server = FakeServer(config.controller.address)
    drained = []
    monkeypatch.setattr(Fleet, "order_drain", lambda *_, **__: drained.append(1))
    controller = Controller(config, OPEN)
    running = asyncio.ensure_future(controller.run())
    tasks = [asyncio.ensure_future(part.run()) for part in (trainer, server)]
    trainer.hold_at(5)
    async with asyncio.timeout(LIMIT_S):
        await trainer.until_held()
        with Journal(config.run_dir / "journal") as later:
            before = len(records_of(config.run_dir))
            with pytest.raises(RunFailed, match="was started later"):
                await running
            later.append(note("start"))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # The servers are left to the later controller, and so is the summary.
    assert not drained and not (config.run_dir / "summary.json").exists()
    assert len(records_of(config.run_dir)) == before + 1
