"""Learner nodes that compare themselves before a run, in one process."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from slipstream.client.launch.findings import (
    CONTROLLER,
    LEARNER,
    SERVER,
    Finding,
    Part,
    Scene,
    Verdict,
)
from slipstream.client.launch.meeting import check_nodes, check_setup
from slipstream.client.launch.share import Share
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from support.fakes.small_configs import small_config
from support.rigs.loopbacks import own_loopback
from support.rigs.waiting import LIMIT_S

ADDRESS = f"{own_loopback()}:7070"


def config_of(folder: Path, nodes: int = 2, **changes: object) -> Config:
    tables: dict[str, Any] = {
        "run": {"dir": str(folder)},
        "controller": {"address": ADDRESS},
        "learner": {"world_size": nodes, "ranks_per_node": 1},
    }
    for name, values in changes.items():
        tables.setdefault(name, {}).update(values)
    return small_config(**tables)


async def meet(config: Config, limit_s: float = 600.0) -> Finding:
    """The doctor's check of the learner's first node."""
    scene = Scene(config, CONTROLLER | LEARNER, Share(range(1)), connect_timeout_s=limit_s)
    found = await check_nodes(scene)
    assert found is not None
    return found


async def compare(config: Config, parts: frozenset[Part] = LEARNER, node: int = 1) -> str | None:
    """The doctor's check of another node of the learner, or of a rollout server."""
    share = Share(node_rank=node)
    return await check_setup(
        Scene(config, parts, share, leaves_nothing=True, connect_timeout_s=60.0)
    )


async def test_nodes_of_one_folder_and_the_same_settings_meet(tmp_path: Path) -> None:
    config = config_of(tmp_path / "runs" / "here", nodes=3)
    first, *others = await asyncio.gather(
        meet(config), compare(config, node=1), compare(config, node=2)
    )
    here = socket.gethostname()
    said = f"all 3 are here: this one, learner node 1 on {here}, learner node 2 on {here}"
    assert (first.verdict, first.seen) == (Verdict.OK, said)
    assert all(str(other).startswith(f"{ADDRESS} answers: same versions") for other in others)
    # Not even the folders that it made are left.
    assert not [*tmp_path.iterdir()]


async def test_a_node_that_differs_is_told_and_the_first_one_does_not_wait_for_it(tmp_path):
    config, other = config_of(tmp_path), config_of(tmp_path, lora={"rank": 8, "alpha": 8})
    met, told = await asyncio.gather(meet(config), compare(other), return_exceptions=True)
    assert isinstance(told, ConfigError)
    assert str(told).startswith("lora.alpha is 8")
    assert not isinstance(met, BaseException)
    assert met.verdict is Verdict.OK


async def test_a_node_that_does_not_come_is_missed(tmp_path: Path) -> None:
    missed = await meet(config_of(tmp_path), 0.01)
    assert missed.verdict is Verdict.PROBLEM
    assert missed.seen == "0 of 1 other nodes asked within 0.01 s: none"


async def test_a_folder_that_cannot_be_written_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^run\.dir: cannot write into /proc/runs: "):
        await meet(config_of(Path("/proc/runs")))


async def test_only_the_first_of_several_nodes_waits_for_others(tmp_path: Path) -> None:
    several, one = config_of(tmp_path), config_of(tmp_path, nodes=1)
    assert await check_nodes(Scene(several, LEARNER, Share(range(1, 2), node_rank=1))) is None
    assert await check_nodes(Scene(one, CONTROLLER | LEARNER, Share(range(1)))) is None


@pytest.mark.parametrize("parts", [SERVER, LEARNER], ids=str)
async def test_servers_need_less_alike_than_ranks(parts: frozenset[Part], tmp_path: Path) -> None:
    config, other = config_of(tmp_path), config_of(tmp_path, learner={"grad_clip": 0.5})
    met, told = await asyncio.gather(meet(config), compare(other, parts), return_exceptions=True)
    assert isinstance(told, str) == (parts == SERVER)
    assert parts == SERVER or str(told).startswith("learner.grad_clip is 0.5 here and 1.0 at the")


async def test_a_rollout_server_that_comes_first_waits_for_the_controller(tmp_path: Path) -> None:
    config, came = config_of(tmp_path), asyncio.Event()

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        came.set()

    async with asyncio.timeout(LIMIT_S):
        async with await asyncio.start_server(hang_up, *ADDRESS.split(":")):
            waiting = asyncio.create_task(compare(config, SERVER))
            await came.wait()
        _, told = await asyncio.gather(meet(config), waiting)
    assert str(told).startswith(f"{ADDRESS} answers: same versions")
