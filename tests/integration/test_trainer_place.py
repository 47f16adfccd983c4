"""One trainer at a time: who has the place in a run, who waits for it, and who is fenced off."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator

import pytest
import tomli_w
from slipstream.core.errors import RunFailed
from slipstream.core.settings.config import Config
from slipstream.learner.controller.application import Controller
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.protocol.access import security
from slipstream.v1 import trainer_pb2
from support.fakes.named_channel import OPEN
from support.rigs.controller_runs import make_config

FIRST = """
import sys
from pathlib import Path
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.core.errors import RunFailed
from slipstream.core.configuration.config_file import load_config
from slipstream.v1 import trainer_pb2

client = ControllerClient(load_config(Path(sys.argv[1])))
hello = trainer_pb2.TrainerHello(
    world_size=1, layout_description="on 1 rank", process="host here, process 1"
)
client.register(hello)
print("registered", flush=True)
sys.stdin.readline()
try:
    client.report_checkpoint(trainer_pb2.CheckpointReport())
except RunFailed as error:
    print(error, flush=True)
"""
HELLO = trainer_pb2.TrainerHello(
    world_size=1, layout_description="on 1 rank", process="host there, process 2"
)


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller finds out within three seconds who does not answer, not within thirty."""
    quick = {"keepalive_time_ms", "keepalive_timeout_ms", "http2.ping_timeout_ms"}
    options = [
        (name, value // 10 if name.removeprefix("grpc.") in quick else value)
        for name, value in security.SERVER_OPTIONS
    ]
    monkeypatch.setattr(security, "SERVER_OPTIONS", tuple(options))


@contextlib.asynccontextmanager
async def controlled(config: Config) -> AsyncIterator[Controller]:
    """A controller without rollout servers; its run has failed at the end."""
    controller = Controller(config, OPEN)
    running = asyncio.ensure_future(controller.run())
    try:
        async with asyncio.timeout(120):
            yield controller
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def first_trainer(config: Config) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has registered and kept its place."""
    path = config.run_dir.with_name("first.toml")
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        FIRST,
        str(path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert await process.stdout.readline() == b"registered\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.usefixtures("quick_pings")
async def test_a_trainer_that_does_not_move_loses_its_place_and_is_fenced_off(
    tmp_path, caplog
):
    config = make_config(tmp_path)
    short = config.model_copy(
        update={"learner": config.learner.model_copy(update={"timeout_s": 3.0})}
    )
    async with controlled(config), first_trainer(config) as first:
        client = ControllerClient(short)
        with pytest.raises(
            RunFailed, match="host here, process 1 has the place in this run"
        ):
            await asyncio.to_thread(client.register, HELLO)
        assert "waiting for the place in the run: " in caplog.text
        client.close()
        first.send_signal(signal.SIGSTOP)
        client = ControllerClient(config)
        await asyncio.to_thread(client.register, HELLO)
        first.send_signal(signal.SIGCONT)
        first.stdin.write(b"\n")
        assert b"another trainer has taken over" in await first.stdout.readline()
        client.close()
