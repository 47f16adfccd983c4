"""How tests wait for an engine: they end when it does."""

import asyncio
from types import SimpleNamespace

import pytest
from support.rigs.running_replies import until_generated
from support.rigs.waiting import LIMIT_S


async def reply(engine: SimpleNamespace, tokens: int) -> None:
    await asyncio.sleep(0)
    engine.count += tokens


async def wait(*tokens: int) -> None:
    engine = SimpleNamespace(count=0)
    use = lambda: SimpleNamespace(generated_tokens=engine.count)  # noqa: E731
    engine.requests = SimpleNamespace(use=use)
    replies = [asyncio.create_task(reply(engine, n)) for n in tokens]
    async with asyncio.timeout(LIMIT_S):
        await until_generated(engine, 10, replies)


async def test_it_goes_on_when_there_are_as_many_tokens() -> None:
    await wait(4, 6)


async def test_it_fails_when_no_reply_is_left_that_could_have_them() -> None:
    with pytest.raises(AssertionError, match="all replies ended with 9 tokens of 10"):
        await wait(4, 5)


async def test_it_fails_as_a_reply_does() -> None:
    with pytest.raises(TypeError):
        await wait(4, None)
