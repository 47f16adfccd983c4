"""Learner nodes that compare themselves before a run, in one process."""

import asyncio
from pathlib import Path

import pytest
from slipstream.client.doctor import meet_nodes
from slipstream.client.launch.checks import compare
from slipstream.client.launch.findings import Verdict
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from support.fakes.small_configs import small_config
from support.rigs.loopbacks import own_loopback

ADDRESS = f"{own_loopback()}:7070"


def config_of(folder: Path, **tables: object) -> Config:
    controller = {"address": ADDRESS}
    return small_config(run={"dir": str(folder)}, controller=controller, **tables)


async def test_nodes_of_one_folder_and_the_same_settings_meet(tmp_path: Path) -> None:
    config = config_of(tmp_path / "runs" / "here")
    first, *others = await asyncio.gather(
        meet_nodes(config, 3, 60.0),
        *(
            compare(config, 60.0, of_ranks=True, asker=f"node {number}", is_awaited=True)
            for number in (1, 2)
        ),
    )
    assert first.verdict is Verdict.OK
    assert first.seen == "all 3 are here: this one, node 1, node 2"
    assert all(other.startswith(f"{ADDRESS} answers: same versions") for other in others)
    # Not even the folders that it made are left.
    assert not [*tmp_path.iterdir()]


async def test_a_node_that_differs_is_told_and_the_first_one_does_not_wait_for_it(tmp_path):
    config, other = config_of(tmp_path), config_of(tmp_path, lora={"rank": 8, "alpha": 8})
    met, told = await asyncio.gather(
        meet_nodes(config, 2, 600.0),
        compare(other, 60.0, of_ranks=True, asker="node 1", is_awaited=True),
        return_exceptions=True,
    )
    assert isinstance(told, ConfigError)
    assert str(told).startswith("lora.alpha is 8")
    assert not isinstance(met, BaseException)
    assert met.verdict is Verdict.OK


async def test_a_node_that_does_not_come_is_missed(tmp_path: Path) -> None:
    missed = await meet_nodes(config_of(tmp_path), 2, 0.01)
    assert missed.verdict is Verdict.PROBLEM
    assert missed.seen == "0 of 1 other nodes asked within 0.01 s: none"


async def test_a_folder_that_cannot_be_written_is_a_finding() -> None:
    found = await meet_nodes(config_of(Path("/proc/runs")), 2, 60.0)
    assert found.verdict is Verdict.PROBLEM
    assert found.seen.startswith("run.dir: cannot write into /proc/runs: ")


@pytest.mark.parametrize("is_server", [True, False])
async def test_servers_need_less_alike_than_ranks(is_server: bool, tmp_path: Path) -> None:
    config, other = config_of(tmp_path), config_of(tmp_path, learner={"grad_clip": 0.5})
    met, told = await asyncio.gather(
        meet_nodes(config, 2, 600.0),
        compare(other, 60.0, of_ranks=not is_server, asker="it", is_awaited=True),
        return_exceptions=True,
    )
    assert isinstance(told, str) == is_server
    assert is_server or str(told).startswith("learner.grad_clip is 0.5 here and 1.0 at the")
