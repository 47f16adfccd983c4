"""A client's own loop over HTTP: real controller and front, servers and a trainer that are none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from slipstream.client.launch.preflight import free_port
from slipstream.core.settings.config import Config
from slipstream.extensions.tinker.front import serve
from slipstream.learner.controller.application import Controller

from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config, play
from support.rigs.loop_client import LoopClient

DATUM = ([1, 2, 3], [2, 3, 4], {"weights": [0.0, 1.0, 1.0]})


def loop_config(tmp_path, **settings: object) -> Config:
    own = settings | {"controller__client_loop": True, "learner__shared_prefix_tokens": 0}
    return make_config(tmp_path, **own, model__dtype="float32", run__steps=1000)


@contextlib.asynccontextmanager
async def fronted(config: Config, *, in_flight: bool = False) -> AsyncIterator[LoopClient]:
    """A client of an HTTP process that ends with it."""
    port = free_port("127.0.0.1")
    front = asyncio.ensure_future(serve(config, port, in_flight=in_flight))
    client = LoopClient(port, base_model=str(config.model.path))
    try:
        async with asyncio.timeout(60):
            await client.ready()
        yield client
    finally:
        await client.http.aclose()
        front.cancel()
        await asyncio.gather(front, return_exceptions=True)


async def played(config: Config, script, *, in_flight: bool = False, **options: object) -> dict:
    """Runs `script(client)` against a whole controller; returns the summary and the fakes."""
    server = FakeServer(config.controller.address, **options)
    trainer = FakeTrainer(config.controller.address)

    async def during(controller: Controller, _tasks) -> None:
        async with fronted(config, in_flight=in_flight) as client:
            await script(client, server, trainer)
        controller.stop("the client has done")

    summary = await play(config, server, trainer=trainer, during=during)
    return summary | {"server": server, "trainer": trainer}
