"""An engine process that is there and never answers, and what ended engines leave."""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from slipstream.core.types import PolicyVersion
from slipstream.rollout_server.engine_interface import EngineDied, Sampling
from slipstream.rollout_server.vllm import engine as engine_module
from slipstream.rollout_server.vllm import engine_pause
from slipstream.rollout_server.vllm.engine import VllmEngine
from slipstream.rollout_server.vllm.engine_requests import TokenCounter
from support.rigs.engine_rig import engine_rig
from support.rigs.waiting import LIMIT_S

SAMPLING = Sampling(1.0, 1.0, 0, max_reply_tokens=4, max_turns=1, max_episode_tokens=8)


async def done(*_: object, **__: object) -> None:
    """Answers at once."""


async def never(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


def engine_that(answers: Callable[..., Awaitable[None]], **others: object) -> VllmEngine:
    """An engine whose vLLM `answers` orders to pause and to resume."""
    llm = SimpleNamespace(
        vllm_config=SimpleNamespace(lora_config=None),
        model_config=SimpleNamespace(model="model"),
        logger_manager=SimpleNamespace(stat_loggers=[TokenCounter(None)]),
        engine_core=SimpleNamespace(pause_scheduler_async=answers),
        update_weight_version=answers,
        resume_generation=answers,
        abort=done,
        errored=False,
        **others,
    )
    return VllmEngine(llm, [], may_stage=False)


async def test_an_engine_that_does_not_pause_or_resume_is_taken_for_dead(monkeypatch) -> None:
    monkeypatch.setattr(engine_pause, "ANSWER_LIMIT_S", 0.01)
    engine = engine_that(never)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineDied, match=r"neither paused nor resumed within 0\.01 s"):
            await engine.pauses.pause()
        with pytest.raises(EngineDied, match=r"neither paused nor resumed within 0\.01 s"):
            await engine.pauses.resume(PolicyVersion(0, 1))


async def test_an_engine_that_generates_no_more_is_taken_for_dead(monkeypatch) -> None:
    monkeypatch.setattr(engine_module, "SILENCE_LIMIT_S", 0.05)
    asked = asyncio.Event()

    async def swallow(*_: object, **__: object) -> object:
        asked.set()
        return SimpleNamespace(get=never)

    engine = engine_that(done, add_request=swallow)
    async with asyncio.timeout(LIMIT_S):
        await engine.pauses.pause()
        request = asyncio.ensure_future(engine.requests.generate("r", [1], SAMPLING, 4))
        await asked.wait()
        # Before an order to resume, the engine need not take a step.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await engine.watch()
        await engine.pauses.resume(PolicyVersion(0, 1))
        with pytest.raises(EngineDied, match=r"made no step for 0\.05 s, with 1 open requests"):
            await engine.watch()
        request.cancel()
        await asyncio.wait([request])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await engine.watch()


@pytest.mark.long
@pytest.mark.parametrize("is_killed", [False, True], ids=["closed", "killed"])
async def test_whoever_ends_an_engine_removes_its_files(is_killed, tmp_path, monkeypatch):
    # A short path: those of sockets have a limit.
    temporary = Path(tempfile.mkdtemp(prefix="t"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    async with engine_rig(tmp_path) as rig:
        (folder,) = temporary.glob("slipstream-sockets-*")
        assert any(path.is_socket() for path in folder.iterdir())
        assert (folder / "store").exists()
        for process in rig.engine._processes if is_killed else ():
            process.kill()
    left = [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    shutil.rmtree(temporary)
    assert left == []
