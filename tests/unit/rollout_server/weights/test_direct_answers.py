"""Answers that forked workers give directly, beside a vLLM that is slow, silent or faster."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from slipstream.rollout_server.weights.direct_answers import DirectAnswers, answer_directly

LIMIT_S = 20
FORK = multiprocessing.get_context("fork")


class Scene:
    """Answers of workers, which are forked as an engine's processes are."""

    def __init__(self) -> None:
        self.answers = DirectAnswers()
        self.workers: list[Any] = []

    def fork(self, work: Callable[..., None], *arguments: object) -> None:
        worker = FORK.Process(target=work, args=arguments)
        worker.start()
        self.workers.append(worker)

    def end_workers(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.join()


@pytest.fixture
def scene() -> Iterator[Scene]:
    found = Scene()
    yield found
    found.end_workers()


def say(calls: Any, place: int) -> None:
    """A worker's loop: answers the calls whose numbers it is given."""
    while (call := calls.get()) is not None:
        answer_directly(call, {"value": [call, place]})


def say_at_once(call: int, text: str) -> None:
    answer_directly(call, {"value": text})


async def never(_: int) -> list[Any]:
    return await asyncio.Event().wait()


async def test_all_workers_answers_count_though_vllm_says_nothing(scene: Scene) -> None:
    queues = [FORK.Queue() for _ in range(2)]
    for place, calls in enumerate(queues):
        scene.fork(say, calls, place)
    scene.answers.listen(2)

    async def call(number: int) -> list[Any]:
        for calls in queues:
            calls.put(number)
        return await never(number)

    try:
        async with asyncio.timeout(LIMIT_S):
            for number in (1, 2):
                found = await scene.answers.of(call)
                expected = [{"value": [number, place]} for place in range(2)]
                assert sorted(found, key=str) == expected
    finally:
        scene.answers.close()


async def test_half_of_the_workers_are_not_enough(scene: Scene) -> None:
    scene.fork(say_at_once, 1, "direct")
    scene.answers.listen(2)
    said = asyncio.Event()

    async def call(_: int) -> list[Any]:
        await said.wait()
        return ["vllm", "vllm"]

    asking = asyncio.ensure_future(scene.answers.of(call))
    scene.workers[0].join()
    await asyncio.sleep(0.1)
    assert not asking.done()
    said.set()
    async with asyncio.timeout(LIMIT_S):
        assert await asking == ["vllm", "vllm"]
    scene.answers.close()


async def test_what_comes_late_is_no_answer_to_the_next_call(scene: Scene) -> None:
    calls = FORK.Queue()
    scene.fork(say, calls, 0)
    scene.answers.listen(1)

    async def faster(_: int) -> list[Any]:
        return ["vllm"]

    async def late(_: int) -> list[Any]:
        calls.put(1)
        calls.put(None)
        await asyncio.to_thread(scene.workers[0].join)
        return ["vllm"]

    async with asyncio.timeout(LIMIT_S):
        assert await scene.answers.of(faster) == ["vllm"]
        assert await scene.answers.of(late) == ["vllm"]
    scene.answers.close()


async def test_an_answer_that_is_too_long_comes_through_vllm(scene: Scene) -> None:
    scene.fork(say_at_once, 1, "x" * 4_000_000)
    scene.answers.listen(1)

    async def call(_: int) -> list[Any]:
        await asyncio.to_thread(scene.workers[0].join)
        return ["vllm"]

    async with asyncio.timeout(LIMIT_S):
        assert await scene.answers.of(call) == ["vllm"]
    assert scene.workers[0].exitcode == 0
    scene.answers.close()


async def test_an_error_of_vllm_is_raised_when_the_workers_are_gone(scene: Scene) -> None:
    scene.fork(say_at_once, 7, "to nobody")
    scene.answers.listen(1)
    scene.workers[0].join()
    # Nobody can answer any more, and nothing is read from now on.
    async with asyncio.timeout(LIMIT_S):
        while scene.answers._socket.fileno() >= 0:
            await asyncio.sleep(0.01)

    async def call(_: int) -> list[Any]:
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):
        await scene.answers.of(call)
    scene.answers.close()
