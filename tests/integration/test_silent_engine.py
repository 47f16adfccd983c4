"""An engine process that is there and never answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from slipstream.protocol.types import PolicyVersion  # noqa: E402
from slipstream.rollout_server.generation import EngineDied  # noqa: E402


async def never(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


async def test_an_engine_that_does_not_pause_or_resume_is_taken_for_dead() -> None:
    from slipstream.rollout_server.engine import VllmEngine, _TokenCounter

    llm = SimpleNamespace(
        logger_manager=SimpleNamespace(stat_loggers=[_TokenCounter(None)]),
        engine_core=SimpleNamespace(pause_scheduler_async=never),
        update_weight_version=never,
        resume_generation=never,
    )
    engine = VllmEngine(llm, [], stage=False, answer_limit_s=0.01)
    async with asyncio.timeout(5):
        with pytest.raises(EngineDied, match=r"neither paused nor resumed within 0\.01 s"):
            await engine.pause()
        with pytest.raises(EngineDied, match=r"neither paused nor resumed within 0\.01 s"):
            await engine.resume(PolicyVersion(0, 1))
