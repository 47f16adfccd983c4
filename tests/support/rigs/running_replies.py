"""Waiting for an engine that generates, in a test."""

import asyncio
from collections.abc import Sequence
from typing import Any

from slipstream.rollout_server.engine_interface import Engine


async def until_generated(engine: Engine, count: int, replies: Sequence[asyncio.Task[Any]]) -> None:
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
            raise AssertionError(f"all replies ended with {generated} tokens of {count}")
        await asyncio.sleep(0.005)
