"""A client's own loop over HTTP: real controller and front, servers and a trainer that are none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from slipstream.core.machine.address import free_port
from slipstream.core.settings.config import Config
from slipstream.extensions.tinker.front import serve
from slipstream.learner.controller.application import Controller

from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.fakes.named_channel import OPEN
from support.rigs.controller_runs import make_config
from support.rigs.loop_client import LoopClient
from support.rigs.run_processes import summary_of
from support.rigs.waiting import LIMIT_S

DATUM = ([1, 2, 3], [2, 3, 4], {"weights": [0.0, 1.0, 1.0]})


def loop_config(tmp_path, **settings: object) -> Config:
    loop_settings = settings | {
        "controller__client_loop": True,
        "learner__shared_prefix_tokens": 0,
    }
    return make_config(
        tmp_path, **loop_settings, model__dtype="float32", run__steps=1000
    )


@contextlib.asynccontextmanager
async def fronted(config: Config, *, in_flight: bool) -> AsyncIterator[LoopClient]:
    """A client of an HTTP process that ends with it."""
    port = free_port("127.0.0.1")
    front = asyncio.ensure_future(serve(config, port, in_flight=in_flight))
    try:
        async with LoopClient(port, base_model=str(config.model.path)) as client:
            await client.ready(lambda: not front.done())
            yield client
    finally:
        front.cancel()
        await asyncio.gather(front, return_exceptions=True)


@contextlib.asynccontextmanager
async def started(
    config: Config, *, is_killed: bool = False, in_flight: bool = False
) -> AsyncIterator[tuple[LoopClient, FakeServer, FakeTrainer]]:
    """A client of a controller and its fakes, which are killed behind it, or end well."""
    server, trainer = (
        kind(config.controller.address) for kind in (FakeServer, FakeTrainer)
    )
    controller = Controller(config, OPEN)
    tasks = [
        asyncio.ensure_future(part.run()) for part in (controller, server, trainer)
    ]
    try:
        async with asyncio.timeout(LIMIT_S):
            async with fronted(config, in_flight=in_flight) as client:
                yield client, server, trainer
            if not is_killed:
                controller.stop("the client has done")
                assert await tasks[0] == 0
                await tasks[2]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not is_killed:
        ledger = summary_of(config.run_dir)["ledger"]
        assert (ledger["difference"], ledger["gaps"]) == (0, [])
