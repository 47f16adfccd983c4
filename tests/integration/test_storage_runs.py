"""Whole runs of the real controller whose servers fetch their weights from storage."""

from pathlib import Path

from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config, play
from support.rigs.waiting import until

STORAGE = {"weights__storage_url": "memory://weights"}


def two_servers(config: Config) -> list[FakeServer]:
    # Room for the other's groups while one fetches.
    address = config.controller.address
    return [
        FakeServer(address, name, max_episodes=8, from_storage=True)
        for name in ("a", "b")
    ]


async def test_a_run_by_storage(tmp_path: Path) -> None:
    config = make_config(tmp_path, **STORAGE)
    trainer = FakeTrainer(config.controller.address)
    summary = await play(config, *two_servers(config), trainer=trainer)
    assert summary["code"] == 0
    assert summary["steps"] == 12
    assert trainer.published == []
    assert trainer.stored[0] == PolicyVersion(0, 0)
    assert max(trainer.lags) <= config.algorithm.max_staleness
    assert summary["versions_fetched"] >= 2
    assert summary["stored_whole_bytes"] == 10 * summary["stored_bytes"]


async def test_the_run_trains_on_while_the_link_of_one_server_stands_still(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path, **STORAGE)
    trainer = FakeTrainer(config.controller.address)
    other, cut = two_servers(config)
    cut.gate.clear()

    async def during(controller: object, _: object) -> None:
        # The server serves a first version, then its link stands still.
        await until(lambda: not (cut.version is None or not cut.leases))
        cut.link.clear()
        cut.gate.set()
        await until(lambda: trainer.version.step >= 12)

    summary = await play(config, other, cut, trainer=trainer, during=during)
    assert summary["code"] == 0
    assert summary["steps"] == 12
    # The bound holds for every token, and no group of the late server was beyond it.
    assert max(trainer.lags) <= config.algorithm.max_staleness
    bound = cut.version.step + config.algorithm.max_staleness
    assert max(lease.deadline_step for lease in cut.leases) <= bound
    (late,) = [text for text in summary["told"] if "server b gets no groups" in text]
    assert f"its version {cut.version.step} is too old" in late


async def test_a_server_that_was_away_takes_part_again(tmp_path: Path) -> None:
    config = make_config(tmp_path, run__steps=20, **STORAGE)
    other, away = two_servers(config)
    trainer = FakeTrainer(config.controller.address, step_s=0.02)
    trainer.hold_at(8)

    async def during(*_: object) -> None:
        await until(lambda: away.version is not None)
        away.link.clear()
        await trainer.until_held()
        away.link.set()
        await until(lambda: away.version.step >= 6)
        trainer.gate.set()

    summary = await play(config, other, away, trainer=trainer, during=during)
    assert summary["code"] == 0
    # The server fetched the newest version that there was each time, not each version.
    steps = [version.step for version in away.loaded_versions]
    assert steps == sorted(set(steps))
    assert steps[-1] > 5
    assert len(steps) < 20
    assert max(trainer.lags) <= config.algorithm.max_staleness
