"""An engine at an address against an unmodified vLLM server that is taken or lost."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
from safetensors.torch import load_file
from slipstream.core.types import PolicyVersion
from slipstream.extensions.address_engine.server.engine import AddressEngine, start
from slipstream.rollout_server.engine_interface import (
    EngineDied,
    FinishReason,
    Sampling,
)
from support.fakes.gloo_sender import GlooSender, layout_of
from support.fakes.small_configs import small_config
from support.rigs.teacher_server import teacher_server

pytestmark = pytest.mark.slow

FLAGS = (
    "--enable-scale-out",
    "--logprobs-mode=processed_logprobs",
    "--generation-config=vllm",
    "--dtype=float32",
    "--max-model-len=256",
)
ENDLESS = Sampling(
    1.0, 1.0, 0, 200, max_turns=1, max_episode_tokens=256, ignore_eos=True
)


@pytest.fixture(scope="module")
def url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        with teacher_server(tiny_model, log, more=FLAGS) as base_url:
            yield base_url.removesuffix("/v1")


@pytest_asyncio.fixture
async def engine(
    url: str, tmp_path: Path, tiny_model: Path
) -> AsyncIterator[AddressEngine]:
    """The server, claimed, with the model's own weights as version 1."""
    config = small_config(
        run={"dir": str(tmp_path)},
        model={"path": str(tiny_model), "dtype": "float32"},
        rollout_server={"engine_url": url},
        weights={"transport": "gloo", "verify_every": 1},
        controller={"turns": "off"},
    )
    engine = await start(config)
    async with contextlib.aclosing(engine):
        sender = GlooSender("c")
        tensors = load_file(tiny_model / "model.safetensors")
        layout = layout_of(tensors, 1 << 20)
        order = sender.order("p1", 1)
        sending = asyncio.create_task(asyncio.to_thread(sender.send, layout, tensors))
        await engine.prepare_weights(order, layout, 1)
        loaded = await engine.receive_weights("p1")
        assert list(loaded.bucket_digests) == await sending
        await engine.pauses.resume(PolicyVersion(0, 1))
        yield engine


def post(url: str, body: object = None) -> None:
    """A call of a stranger."""
    httpx.post(url, json=body, timeout=60).raise_for_status()


async def test_a_request_that_waits_in_a_paused_server_is_cancelled(engine) -> None:
    await engine.pauses.pause()
    async with asyncio.timeout(60):
        reply = asyncio.create_task(
            engine.requests.generate("r/1", [1, 3], ENDLESS, 200)
        )
        await engine.requests.cancel("unknown")
        while engine.requests.use().open_requests == 0:
            await asyncio.sleep(0)
        await engine.requests.cancel("r/1")
        generation = await reply
    assert generation.finish_reason is FinishReason.CANCELLED
    assert len(generation.token_ids) == 0


async def test_a_strangers_resume_is_noticed(url, engine) -> None:
    await engine.pauses.pause()
    post(f"{url}/resume")
    with pytest.raises(EngineDied, match="another program has resumed"):
        async with asyncio.timeout(60):
            await engine.watch()


async def test_a_foreign_version_is_noticed_and_refused(url, engine) -> None:
    post(f"{url}/update_weight_version", {"new_version": "another:0:3"})
    with pytest.raises(EngineDied, match="'another:0:3'"):
        await engine.requests.generate("r/4", [1, 3], ENDLESS, 5)
    with pytest.raises(EngineDied, match="'another:0:3'"):
        async with asyncio.timeout(60):
            await engine.watch()


# Last in this file: the server is gone afterwards.
async def test_a_lost_server_is_noticed_and_fails_its_replies(url, engine) -> None:
    port = int(url.rpartition(":")[2])
    (server,) = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    assert server is not None
    # The reply does not end meanwhile.
    await engine.pauses.pause()
    async with asyncio.timeout(60):
        reply = asyncio.create_task(
            engine.requests.generate("r/5", [1, 3], ENDLESS, 200)
        )
        while engine.requests.use().open_requests == 0:
            await asyncio.sleep(0)
        os.kill(server, signal.SIGKILL)
        with pytest.raises(EngineDied, match="was lost at /inference"):
            await reply
        with pytest.raises(EngineDied, match="was lost at /weight_info"):
            await engine.watch()
    assert engine.requests.use().generated_tokens == 0
