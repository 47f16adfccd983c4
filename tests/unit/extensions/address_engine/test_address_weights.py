"""Weights on their way to a server at an address, over gloo and by a file."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from slipstream.core.errors import WeightSyncError
from slipstream.core.types import PolicyVersion
from slipstream.extensions.address_engine.server.engine import AddressEngine, start
from slipstream.rollout_server.engine_interface import EngineDied
from support.fakes.address_server import AddressServer, address_server
from support.fakes.gloo_sender import GlooSender, layout_of
from support.fakes.small_configs import small_config

TENSORS = {
    "a.weight": torch.arange(6000, dtype=torch.float32).reshape(60, 100),
    "b.weight": torch.ones(3, 5, dtype=torch.bfloat16),
}


class LoadingServer(AddressServer):
    """Reads what it is told to load, as vLLM does, while it is paused."""

    loaded: dict[str, torch.Tensor]
    was_paused = False
    # Whether a stranger resumes it during a load.
    is_resumed = False

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path != "/collective_rpc":
            return super().answer(path, body)
        assert body["method"] == "reload_weights"
        folder = Path(body["kwargs"]["weights_path"])
        self.loaded = load_file(folder / "model.safetensors")
        self.was_paused = self.is_paused
        self.is_paused = not self.is_resumed
        return 200, {"results": [None]}


@pytest_asyncio.fixture
async def scene(
    tmp_path: Path,
) -> AsyncIterator[tuple[LoadingServer, AddressEngine]]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 32}))
    with address_server(LoadingServer) as server:
        config = small_config(
            run={"dir": str(tmp_path)},
            model={"path": str(model), "dtype": "float32"},
            rollout_server={"engine_url": server.url},
            weights={"transport": "gloo", "verify_every": 1},
            controller={"turns": "off"},
        )
        engine = await start(config)
        async with contextlib.aclosing(engine):
            yield server, engine


async def publish(engine: AddressEngine, sender: GlooSender, step: int) -> list[bytes]:
    """Publishes TENSORS; returns the digests that the engine tells."""
    order = sender.order(f"p{step}", step)
    layout = layout_of(TENSORS)
    sending = asyncio.create_task(asyncio.to_thread(sender.send, layout, TENSORS))
    await engine.prepare_weights(order, layout, 1)
    try:
        loaded = await engine.receive_weights(order.publish_id)
    finally:
        digests = await sending
    assert list(loaded.bucket_digests) == digests
    return digests


async def test_a_paused_server_loads_each_version_and_serves_it_by_name(scene) -> None:
    server, engine = scene
    sender = GlooSender("c")
    for step in (1, 2):
        server.loaded = {}
        assert await publish(engine, sender, step)
        assert server.was_paused
        assert server.is_paused
        assert server.loaded.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert torch.equal(server.loaded[name], tensor)
        await engine.pauses.resume(PolicyVersion(0, step))
        assert not server.is_paused
        assert server.version.endswith(f":0:{step}")
    # Nothing of a version stays.
    assert not list(engine._folder.iterdir())


async def test_a_probe_is_the_servers_own_answer(scene) -> None:
    _, engine = scene
    await engine.pauses.resume(PolicyVersion(0, 1))
    scored = await engine.teacher_forced_logprobs([[1, 2, 3], [4, 5]])
    assert scored.tolist() == [-1.0, -2.0, -1.0]


async def test_a_load_that_fails_fails_the_publish_alone(scene) -> None:
    server, engine = scene
    sender = GlooSender("c")
    server.statuses["/collective_rpc"] = 500
    with pytest.raises(WeightSyncError, match="answered 500 to /collective_rpc"):
        await publish(engine, sender, 1)
    server.statuses.clear()
    await publish(engine, sender, 2)


async def test_a_strangers_resume_during_a_load_ends_the_engine(scene) -> None:
    server, engine = scene
    server.is_resumed = True
    with pytest.raises(EngineDied, match="another program has resumed"):
        await publish(engine, GlooSender("c"), 1)


async def test_what_was_not_prepared_is_not_received(scene) -> None:
    _, engine = scene
    with pytest.raises(WeightSyncError, match="was not prepared"):
        await engine.receive_weights("p1")
