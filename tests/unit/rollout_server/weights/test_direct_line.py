"""A line to forked workers, beside a vLLM that is slow, silent or faster."""

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from slipstream.rollout_server.engine_interface import EngineDied
from slipstream.rollout_server.weights.direct_line import DirectLine, WorkerEnd, tell
from support.rigs.waiting import until

pytestmark = pytest.mark.process

LIMIT_S = 20
FORK = multiprocessing.get_context("fork")


class Scene:
    """Answers of workers, which are forked as an engine's processes are."""

    def __init__(self, num_workers: int) -> None:
        self.line = DirectLine(num_workers)
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
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    found = Scene(getattr(request, "param", 1))
    yield found
    found.line.close()
    found.end_workers()


two_workers = pytest.mark.parametrize("scene", [2], indirect=True, ids=["two"])


def say(calls: Any, place: int) -> None:
    """A worker's loop: answers the calls whose numbers it is given."""
    end = WorkerEnd(place)
    while (call := calls.get()) is not None:
        end.answer(call, {"value": [call, place]})


def say_at_once(call: int, text: str) -> None:
    WorkerEnd(0).answer(call, {"value": text})


def answer_and_end(place: int) -> None:
    WorkerEnd(place).answer(1, {"value": place})


async def never(_: int) -> list[Any]:
    return await asyncio.Event().wait()


@two_workers
async def test_all_workers_answers_count_though_vllm_says_nothing(scene: Scene) -> None:
    queues = [FORK.Queue() for _ in range(2)]
    for place, calls in enumerate(queues):
        scene.fork(say, calls, place)
    scene.line.listen()

    async def call(number: int) -> list[Any]:
        for calls in queues:
            calls.put(number)
        return await never(number)

    async with asyncio.timeout(LIMIT_S):
        for number in (1, 2):
            found = await scene.line.answers(call)
            expected = [{"value": [number, place]} for place in range(2)]
            assert sorted(found, key=str) == expected


@two_workers
async def test_half_of_the_workers_are_not_enough(scene: Scene) -> None:
    scene.fork(say_at_once, 1, "direct")
    scene.line.listen()
    said = asyncio.Event()

    async def call(_: int) -> list[Any]:
        await said.wait()
        return ["vllm", "vllm"]

    asking = asyncio.ensure_future(scene.line.answers(call))
    scene.workers[0].join()
    await asyncio.sleep(0.1)
    assert not asking.done()
    said.set()
    async with asyncio.timeout(LIMIT_S):
        assert await asking == ["vllm", "vllm"]


async def test_what_comes_late_is_no_answer_to_the_next_call(scene: Scene) -> None:
    calls = FORK.Queue()
    scene.fork(say, calls, 0)
    scene.line.listen()

    async def faster(_: int) -> list[Any]:
        return ["vllm"]

    async def late(_: int) -> list[Any]:
        calls.put(1)
        calls.put(None)
        await asyncio.to_thread(scene.workers[0].join)
        return ["vllm"]

    async with asyncio.timeout(LIMIT_S):
        assert await scene.line.answers(faster) == ["vllm"]
        assert await scene.line.answers(late) == ["vllm"]


@two_workers
async def test_answers_that_arrived_before_the_workers_ended_are_read(scene: Scene) -> None:
    for place in range(2):
        scene.fork(answer_and_end, place)
    for worker in scene.workers:
        worker.join()
    scene.line.listen()
    async with asyncio.timeout(LIMIT_S):
        found = await scene.line.answers(never)
    assert sorted(answer["value"] for answer in found) == [0, 1]


async def test_an_answer_that_is_too_long_comes_through_vllm(scene: Scene) -> None:
    scene.fork(say_at_once, 1, "x" * 4_000_000)
    scene.line.listen()

    async def call(_: int) -> list[Any]:
        await asyncio.to_thread(scene.workers[0].join)
        return ["vllm"]

    async with asyncio.timeout(LIMIT_S):
        assert await scene.line.answers(call) == ["vllm"]
    assert scene.workers[0].exitcode == 0


async def test_an_error_of_vllm_is_raised_when_the_workers_are_gone(scene: Scene) -> None:
    scene.fork(say_at_once, 7, "to nobody")
    scene.line.listen()
    scene.workers[0].join()
    # No worker can answer any more, and nothing more is read.
    await until(lambda: scene.line._sockets[0].fileno() < 0, LIMIT_S)

    async def call(_: int) -> list[Any]:
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):
        await scene.line.answers(call)


# More than a socket takes at once.
LONG = "x" * 50_000


def serve(place: int, stays: bool) -> None:
    """A worker that answers a call and then hears of others on the line."""
    end = WorkerEnd(place)

    def work(call: int) -> None:
        if not stays:
            os._exit(1)
        end.answer(call, {"value": threading.current_thread().name})

    def talk(call: int) -> None:
        for number in range(call - 20, call + 1):
            end.answer(number, {"value": LONG})

    end.serve({"work": work, "talk": talk})
    end.answer(1, {"value": place})
    threading.Event().wait()


async def up(scene: Scene) -> None:
    """Listens until all workers have answered the first call."""
    scene.line.listen()
    assert not scene.line.is_up
    async with asyncio.timeout(LIMIT_S):
        answers = await scene.line.answers(never)
    assert sorted(answer["value"] for answer in answers) == list(range(len(scene.workers)))
    assert scene.line.is_up


@two_workers
async def test_workers_do_in_a_thread_of_theirs_what_they_hear_on_the_line(scene: Scene) -> None:
    for place in range(2):
        scene.fork(serve, place, True)
    await up(scene)
    async with asyncio.timeout(LIMIT_S):
        for _ in range(2):
            assert await scene.line.call("work") == [{"value": "direct-line"}] * 2


@two_workers
async def test_an_answer_that_comes_by_the_line_alone_waits_for_room_in_it(scene: Scene) -> None:
    for place in range(2):
        scene.fork(serve, place, True)
    await up(scene)
    async with asyncio.timeout(LIMIT_S):
        asking = asyncio.create_task(scene.line.call("talk"))
        await asyncio.sleep(0)
        # The server is busy: it reads nothing meanwhile.
        time.sleep(0.3)  # noqa: ASYNC251
        assert await asking == [{"value": LONG}] * 2


@two_workers
async def test_a_call_on_the_line_ends_with_the_engine(scene: Scene) -> None:
    for place in range(2):
        scene.fork(serve, place, False)
    await up(scene)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineDied, match="the engine is gone"):
            await scene.line.call("work")
    # The next update goes through vLLM, which knows what became of its engine.
    assert not scene.line.is_up


def fall_silent(call: int) -> None:
    """A worker that answers a call and hears of no other."""
    WorkerEnd(0).answer(call, {"value": 0})
    threading.Event().wait()


async def test_a_call_that_no_worker_read_ends_with_the_engine(scene: Scene) -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    scene.fork(fall_silent, 1)
    await up(scene)
    async with asyncio.timeout(LIMIT_S):
        calling = asyncio.create_task(scene.line.call("work"))
        await asyncio.sleep(0)
        scene.end_workers()
        with pytest.raises(EngineDied, match="the engine is gone"):
            await calling
    assert not failures


async def test_a_call_on_the_line_ends_when_the_server_closes_it(scene: Scene) -> None:
    scene.fork(fall_silent, 1)
    await up(scene)
    async with asyncio.timeout(LIMIT_S):
        calling = asyncio.create_task(scene.line.call("work"))
        await asyncio.sleep(0)
        scene.line.close()
        with pytest.raises(EngineDied, match="the engine is gone"):
            await calling


def tell_marks(place: int, marks: list[str]) -> None:
    for mark in marks:
        WorkerEnd(place).tell(mark)
    # The end of one socket ends the line: the other worker might not have told its mark before.
    threading.Event().wait()


@two_workers
async def test_a_mark_counts_when_all_workers_have_told_it(scene: Scene) -> None:
    with scene.line.marked("paused for p1") as paused, scene.line.marked("other") as other:
        scene.fork(tell_marks, 0, ["paused for p1", "other"])
        scene.fork(tell_marks, 1, ["paused for p1"])
        scene.line.listen()
        async with asyncio.timeout(LIMIT_S):
            await paused
        assert not other.done()
        # Workers may not listen yet.
        assert not scene.line.is_up


def tell_and_stay(mark: str) -> None:
    tell(mark)
    threading.Event().wait()


@two_workers
async def test_the_engines_process_tells_a_mark_for_all_workers(scene: Scene) -> None:
    with scene.line.marked("resumed 1") as resumed:
        scene.fork(tell_and_stay, "resumed 1")
        scene.line.listen()
        async with asyncio.timeout(LIMIT_S):
            await resumed
