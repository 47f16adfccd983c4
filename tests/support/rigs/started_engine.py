"""A rollout engine in the process of a test."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from slipstream.core.settings.config import Config
from slipstream.protocol.codec import version_from_pb
from slipstream.rollout_server import child_processes
from slipstream.rollout_server.engine_interface import Engine, LoadedWeights
from slipstream.v1 import weights_pb2

from support.fakes.gloo_sender import GlooSender

if TYPE_CHECKING:
    from slipstream.rollout_server.vllm.engine import VllmEngine


# Blocks of 128 tokens, for 16 episodes of the 3000 tokens that the longest rig allows, and more
# than any test fills. The smallest KV cache that a setting allows, a GiB, takes a second to clear.
NUM_BLOCKS = 512


def with_small_cache(config: Config) -> Config:
    """The same with few blocks of KV cache, unless its table for vLLM says how many."""
    server = config.rollout_server
    table = {"num_gpu_blocks_override": NUM_BLOCKS, **server.engine}
    return config.model_copy(
        update={"rollout_server": server.model_copy(update={"engine": table})}
    )


def become_a_server(config: Config) -> None:
    """What a rollout server's process sets before it imports vLLM, on CPU."""
    os.environ |= child_processes.engine_environment(config, on_cpu=True)
    # The engine's processes are forked: a pool of threads would not live on in them.
    torch.set_num_threads(1)
    end_thread_pool()


def end_thread_pool() -> None:
    """Ends the threads that OpenMP has kept since earlier tests.

    A forked process would wait for them for ever in its first parallel region of two threads or
    more, as vLLM has with drafts of numba's.
    """
    maps = Path("/proc/self/maps").read_text().splitlines()
    libraries = {line.split()[-1] for line in maps if "libgomp" in line}
    for library in libraries:
        # 2 is omp_pause_hard of OpenMP 5.0.
        assert ctypes.CDLL(library).omp_pause_resource_all(2) == 0


async def end_engine(engine: VllmEngine) -> None:
    """Closes an engine, and has the finalisers of vLLM's client run before those of its modules."""
    await engine.aclose()
    gc.unfreeze()
    del engine.llm
    gc.collect()


@asynccontextmanager
async def started_engine(config: Config) -> AsyncIterator[VllmEngine]:
    """The engine, paused; at the end of the block its processes are gone."""
    become_a_server(config)
    from slipstream.rollout_server.vllm.engine import VllmEngine

    engine = await VllmEngine.start(with_small_cache(config), seed=1)
    try:
        yield engine
    finally:
        await end_engine(engine)
        assert not [p for p in engine._processes if p.is_running()]


async def publish(
    engine: VllmEngine,
    sender: GlooSender,
    order: weights_pb2.PublishOrder,
    layout: weights_pb2.WeightLayout,
    tensors: Mapping[str, torch.Tensor],
    **sending: Any,
) -> LoadedWeights:
    """A whole publish; the engine serves the order's version afterwards. `sending`: see `send`."""
    sent = asyncio.create_task(
        asyncio.to_thread(sender.send, layout, tensors, **sending)
    )
    try:
        await engine.prepare_weights(order, layout, 1)
        loaded = await engine.receive_weights(order.publish_id)
    finally:
        digests = (await asyncio.gather(sent, return_exceptions=True))[0]
    assert list(loaded.bucket_digests) == digests
    await engine.pauses.resume(version_from_pb(order.version))
    return loaded


async def until_generated(
    engine: Engine, count: int, replies: Sequence[asyncio.Task[Any]]
) -> None:
    """Waits until the engine has generated `count` tokens; fails when every reply has ended.

    A reply that failed raises here.
    """
    while engine.requests.use().generated_tokens < count:
        ended = [reply for reply in replies if reply.done()]
        for reply in ended:
            reply.result()
        # Counted before the reply is handed out.
        generated = engine.requests.use().generated_tokens
        if len(ended) == len(replies) and generated < count:
            raise AssertionError(
                f"all replies ended with {generated} tokens of {count}"
            )
        await asyncio.sleep(0.005)
