"""Whole runs of the real controller whose servers take weights from storage, near and far."""

from pathlib import Path

from slipstream.core.types import PolicyVersion
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config, play
from support.rigs.waiting import until

STORAGE = {"weights__storage_url": "memory://weights"}


async def test_a_run_whose_servers_all_read_storage(tmp_path: Path) -> None:
    config = make_config(tmp_path, **STORAGE)
    servers = [
        FakeServer(config.controller.address, name, from_storage=True) for name in ("a", "b")
    ]
    trainer = FakeTrainer(config.controller.address)
    summary = await play(config, *servers, trainer=trainer)
    assert summary["code"] == 0
    assert summary["steps"] == 12
    assert trainer.published == []
    assert trainer.stored[0] == PolicyVersion(0, 0)
    assert max(trainer.lags) <= config.algorithm.max_staleness
    assert summary["versions_fetched"] >= 2
    assert summary["stored_whole_bytes"] == 10 * summary["stored_bytes"]


async def test_near_servers_train_on_while_a_far_one_fetches(tmp_path: Path) -> None:
    config = make_config(tmp_path, **STORAGE)
    # Room for the far server's groups.
    near = FakeServer(config.controller.address, "near", max_episodes=8)
    far = FakeServer(config.controller.address, "far", from_storage=True)
    far.gate.clear()
    trainer = FakeTrainer(config.controller.address)

    async def during(controller: object, _: object) -> None:
        # The far server serves a first version, then its link stands still.
        await until(lambda: not (far.version is None or not far.leases))
        far.link.clear()
        far.gate.set()
        await until(lambda: trainer.version.step >= 12)

    summary = await play(config, near, far, trainer=trainer, during=during)
    assert summary["code"] == 0
    assert summary["steps"] == 12
    # The bound holds for every token, and no group of the far server was beyond it.
    assert max(trainer.lags) <= config.algorithm.max_staleness
    assert far.version is not None
    bound = far.version.step + config.algorithm.max_staleness
    assert max(lease.deadline_step for lease in far.leases) <= bound
    assert near.loaded_versions[-1].step >= 11
    (late,) = [text for text in summary["told"] if "gets no groups" in text]
    assert f"its version {far.version.step} is too old" in late


async def test_a_slow_link_makes_a_server_older_and_no_step_longer(tmp_path: Path) -> None:
    config = make_config(tmp_path, run__steps=40, algorithm__max_staleness=12, **STORAGE)
    near = FakeServer(config.controller.address, "near", max_episodes=8)
    far = FakeServer(config.controller.address, "far", from_storage=True)
    trainer = FakeTrainer(config.controller.address, step_s=0.05)
    # A fetch takes four steps and more.
    far.fetch_s = 0.2
    summary = await play(config, near, far, trainer=trainer)
    assert summary["code"] == 0
    assert max(trainer.lags) <= config.algorithm.max_staleness
    by_far = [t for batch in trainer.batches for t in batch if t.server_id == "far"]
    assert by_far
    steps = [version.step for version in far.loaded_versions]
    assert steps == sorted(set(steps))
    # It fetched the newest version there was each time, not each version.
    assert len(steps) < 40


async def test_a_far_server_that_was_away_takes_part_again(tmp_path: Path) -> None:
    config = make_config(tmp_path, run__steps=20, **STORAGE)
    near = FakeServer(config.controller.address, "near")
    far = FakeServer(config.controller.address, "far", from_storage=True)
    trainer = FakeTrainer(config.controller.address, step_s=0.02)
    trainer.hold_at(8)

    async def during(*_: object) -> None:
        await until(lambda: far.version is not None)
        far.link.clear()
        await trainer.until_held()
        far.link.set()
        await until(lambda: far.version.step >= 6)
        trainer.gate.set()

    summary = await play(config, near, far, trainer=trainer, during=during)
    assert summary["code"] == 0
    assert far.loaded_versions[-1].step > 5
    assert max(trainer.lags) <= config.algorithm.max_staleness


async def test_storage_that_takes_nothing_leaves_near_servers_at_work(tmp_path: Path) -> None:
    config = make_config(tmp_path, **STORAGE)
    near = FakeServer(config.controller.address, "near")
    far = FakeServer(config.controller.address, "far", from_storage=True)
    trainer = FakeTrainer(config.controller.address)
    trainer.storage_error = "storage memory://weights could not write x: no permission"
    summary = await play(config, near, far, trainer=trainer)
    assert summary["code"] == 0
    assert far.loaded_versions == []


async def test_a_server_that_reads_storage_needs_a_run_that_writes_there(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    near = FakeServer(config.controller.address, "near")
    far = FakeServer(config.controller.address, "far", from_storage=True)
    trainer = FakeTrainer(config.controller.address)
    summary = await play(config, near, far, trainer=trainer)
    assert summary["code"] == 0
    assert trainer.stored == []
    assert far.leases == []
