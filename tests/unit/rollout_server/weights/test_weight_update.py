"""What an engine's workers are asked for an update, with workers that only answer."""

import asyncio
import contextlib
from typing import Any

import pytest
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.buckets import TensorSpec, layout_to_pb
from slipstream.rollout_server import weight_orders
from slipstream.rollout_server.engine_interface import EngineDied
from slipstream.rollout_server.weight_orders import WeightUpdate
from slipstream.v1 import weights_pb2

LAYOUT = layout_to_pb([TensorSpec("a", "bfloat16", (4,))], bucket_bytes=1024)
OTHER_LAYOUT = layout_to_pb([TensorSpec("a", "bfloat16", (8,))], bucket_bytes=1024)
ADAPTERS = layout_to_pb((), 1024, adapters=[TensorSpec("a", "bfloat16", (4,))])
NO_LAYOUT = weights_pb2.WeightLayout()
LOADED = ["pause", "paused", "receive"]
COPIED = ["pause", "begin", "paused", "receive"]


def order(publish_id: str, **changed: Any) -> weights_pb2.PublishOrder:
    values = {
        "publish_id": publish_id,
        "bucket_deadline_s": 1.0,
        "join_deadline_s": 1.0,
    }
    return weights_pb2.PublishOrder(**values | changed)


ORDER = order("p1")


def result(digest: str = "0a", **changed: Any) -> dict[str, Any]:
    times = {"receive_s": 0.5, "load_s": 0.25, "wire_s": 0.1, "began_s": 0.0}
    return {"digests": [digest], "by_plan": True, "has_plan": True} | times | changed


def both(value: object) -> list[dict[str, Any]]:
    return [{"value": value}, {"value": value}]


READY = both(True)
FAILED = [{"value": result()}, {"error": "a bucket did not arrive"}]
RIGHT = [READY, both(result())]
BY_LOADER = both(result(by_plan=False))


class Engine:
    """Two workers; `answers` holds what both say to each call but `begin`, in order."""

    def __init__(self, *answers: list[dict[str, Any]], may_stage: bool = False) -> None:
        self._answers, self.begun = list(answers), both(None)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        # The names of the calls, with the beginning and the end of each pause.
        self.started: list[str] = []
        self.update = WeightUpdate(self.ask, self.pause, may_stage=may_stage)

    async def ask(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        self.calls.append((method, arguments))
        self.started.append(self.calls[-1][0])
        return self.begun if method == "begin" else self._answers.pop(0)

    async def pause(self, _: float) -> float:
        self.started.append("pause")
        await asyncio.sleep(0.01)
        self.started.append("paused")
        return 0.01

    async def take(self, told=ORDER, layout=LAYOUT, resume_idle=None, *, is_busy=True):
        """Prepares and receives one update; `started` has its calls afterwards."""
        self.started.clear()
        await self.update.prepare(told, layout, 3, is_busy=is_busy)
        return await self.update.receive(told.publish_id, resume_idle)

    def numbered(self) -> list[str]:
        """The names of all calls but `begin`."""
        return [name for name, _ in self.calls if name != "begin"]

    def prepared(self) -> list[tuple[Any, ...]]:
        """The arguments of each call that prepared an update; the last one says if it is staged."""
        return [arguments for name, arguments in self.calls if name == "prepare"]

    def staged(self) -> list[bool]:
        return [arguments[-1] for arguments in self.prepared()]


async def idle(*_: object) -> None:
    """Gives an idle engine its new version at once."""


async def test_where_nobody_is_waited_for_one_call_prepares_an_update() -> None:
    first = result(receive_s=2.0, wire_s=0.3, began_s=3.5)
    second = result(began_s=3.25)
    engine = Engine(READY, [{"value": first}, {"value": second}], may_stage=True)
    loaded = await engine.take()
    assert [name for name, _ in engine.calls] == ["prepare", "receive"]
    described = (ORDER.SerializeToString(), LAYOUT.SerializeToString(), 3, False)
    assert engine.prepared() == [described]
    assert (loaded.bucket_digests, loaded.stages.copied) == ((b"\x0a",), True)
    # The slowest worker gives the times; in the longer time on the wire one waited for the other.
    assert (loaded.stages.receive_s, loaded.stages.load_s, loaded.stages.wire_s) == (
        2.0,
        0.25,
        0.1,
    )
    # The copies begin where the first worker began.
    assert loaded.began_s == 3.25


async def test_adapters_alone_are_staged_by_workers_without_a_plan_too() -> None:
    calls = both(1 << 20), READY
    engine = Engine(READY, both(result(has_plan=False)), *calls, may_stage=True)
    await engine.take()
    await engine.update.prepare(ORDER, ADAPTERS, 3)
    assert engine.staged() == [False, True]


async def test_adapters_alone_after_weights_are_another_layout() -> None:
    engine = Engine(*RIGHT, *RIGHT, both(result()), *RIGHT)
    for publish_id, layout in (
        ("p1", LAYOUT),
        ("p2", ADAPTERS),
        ("p3", NO_LAYOUT),
        ("p4", LAYOUT),
    ):
        await engine.take(order(publish_id), layout)
    assert engine.numbered() == [
        *2 * ["prepare", "receive"],
        "receive",
        "prepare",
        "receive",
    ]
    assert engine.prepared()[1][1] == ADAPTERS.SerializeToString()
    # Weights are copied again after them.
    assert engine.started == ["prepare", *COPIED]


async def test_an_update_like_the_one_before_asks_the_workers_once() -> None:
    engine = Engine(READY, *3 * [both(result())])
    for publish_id, layout in (("p1", LAYOUT), ("p2", LAYOUT), ("p3", NO_LAYOUT)):
        await engine.take(order(publish_id), layout)
    assert engine.numbered() == ["prepare", *3 * ["receive"]]


@pytest.mark.parametrize(
    ("changed", "layout"),
    [
        ({"new_communicator": True}, LAYOUT),
        ({"communicator": weights_pb2.Communicator(communicator_id="other")}, LAYOUT),
        ({"bucket_deadline_s": 2.0}, LAYOUT),
        ({}, OTHER_LAYOUT),
    ],
)
async def test_whatever_is_new_is_prepared(changed, layout):
    engine = Engine(*RIGHT, *RIGHT)
    await engine.take()
    await engine.take(order("p2", **changed), layout)
    assert engine.numbered() == 2 * ["prepare", "receive"]
    assert engine.prepared()[1][1] == layout.SerializeToString()


@pytest.mark.parametrize(
    ("unlike", "error"),
    [
        (FAILED, "a bucket did not arrive"),
        (
            [{"value": result("0a")}, {"value": result("0b")}],
            "received different bytes",
        ),
        ([{"value": result()}, {"value": result(by_plan=False)}], ""),
    ],
)
async def test_an_update_after_one_that_was_not_copied_everywhere_is_prepared(
    unlike, error
):
    engine = Engine(READY, unlike, READY)
    with (
        pytest.raises(WeightSyncError, match=error)
        if error
        else contextlib.nullcontext()
    ):
        await engine.take()
    with pytest.raises(WeightSyncError, match="'p1' was not prepared"):
        await engine.update.receive("p1")
    await engine.update.prepare(order("p2"), NO_LAYOUT, 3)
    assert [name for name, _ in engine.calls] == ["prepare", "receive", "prepare"]
    assert engine.prepared()[1][1] == LAYOUT.SerializeToString()


async def test_the_first_update_needs_a_layout() -> None:
    with pytest.raises(WeightSyncError, match="'p1' came without a layout"):
        await Engine().take(layout=NO_LAYOUT)


@pytest.mark.parametrize("may_stage", [False, True])
async def test_weights_of_another_layout_are_loaded_when_the_engine_stands_still(
    may_stage,
):
    engine = Engine(*2 * [READY, BY_LOADER], may_stage=may_stage)
    for publish_id, layout in (("p1", LAYOUT), ("p2", OTHER_LAYOUT)):
        await engine.take(order(publish_id), layout)
        assert engine.started == ["prepare", *LOADED]
    assert engine.staged() == [False, False]


@pytest.mark.parametrize("is_busy", [False, True])
async def test_an_update_that_could_not_begin_fails_with_that_error(
    is_busy: bool,
) -> None:
    engine = Engine(*RIGHT, READY, 2 * [{"error": "no update was announced"}])
    engine.begun = [{"value": None}, {"error": "a bucket did not arrive"}]
    await engine.take()
    with pytest.raises(WeightSyncError, match="a bucket did not arrive"):
        await engine.take(
            order("p2", new_communicator=True), LAYOUT, None if is_busy else idle
        )
    assert engine.numbered() == 2 * ["prepare", "receive"]


async def test_a_failed_update_is_over_when_no_worker_is_inside_it_any_more() -> None:
    engine = Engine(*RIGHT, *RIGHT)
    engine.begun = [{"value": None}, {"error": "a bucket did not arrive"}]
    is_asked = asyncio.Event()
    is_over = asyncio.Event()

    def is_begun() -> bool:
        return any(name == "begin" for name, _ in engine.calls)

    async def ask(method: str, arguments: tuple[Any, ...]) -> list[Any]:
        if method == "receive" and is_begun():
            is_asked.set()
            await is_over.wait()
            return [{"error": "no update was announced"}, {"error": "a member is gone"}]
        return await engine.ask(method, arguments)

    engine.update = WeightUpdate(ask, engine.pause, may_stage=False)
    await engine.take()
    receiving = asyncio.create_task(
        engine.take(order("p2", new_communicator=True), LAYOUT, idle)
    )
    await is_asked.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not receiving.done()
    is_over.set()
    with pytest.raises(WeightSyncError, match="a bucket did not arrive"):
        await receiving


async def test_it_is_asked_until_every_worker_is_ready() -> None:
    engine = Engine([{"value": True}, {"value": False}], both(False), READY)
    await engine.update.prepare(ORDER, LAYOUT, 1)
    assert [name for name, _ in engine.calls] == ["prepare", "is_ready", "is_ready"]


async def test_workers_stage_only_when_all_of_them_have_a_plan() -> None:
    one_loads = [{"value": result()}, {"value": result(has_plan=False)}]
    staged = both(1 << 20), READY, one_loads
    engine = Engine(READY, FAILED, *RIGHT, *staged, *RIGHT, may_stage=True)
    with pytest.raises(WeightSyncError, match="a bucket did not arrive"):
        await engine.take()
    for _ in range(3):
        await engine.take()
    assert engine.staged() == [False, False, True, False]


def rooms(*sizes: int) -> list[dict[str, Any]]:
    return [{"value": size} for size in sizes]


# A bucket's size is a multiple of 16.
@pytest.mark.parametrize(
    ("is_busy", "room", "staged"),
    [(True, (16, 17), True), (True, (17, 15), False), (False, (), False)],
)
async def test_updates_are_staged_while_requests_run_where_all_workers_have_room(
    is_busy, room, staged
):
    calls = [rooms(*room)] * bool(room) + [READY] * staged
    engine = Engine(*RIGHT, *calls, both(result()), may_stage=True)
    assert not (await engine.take()).stages.staged
    assert (
        await engine.take(order("p2"), NO_LAYOUT, is_busy=is_busy)
    ).stages.staged is staged
    assert engine.staged() == [False, True][: 1 + staged]


async def test_workers_are_asked_for_room_once_for_a_layout():
    small = [*RIGHT, rooms(100, 10), both(result())]
    engine = Engine(*RIGHT, rooms(100, 90), *RIGHT, *RIGHT, *small, may_stage=True)
    for number, layout in enumerate((*3 * [LAYOUT], *2 * [OTHER_LAYOUT])):
        await engine.take(order(f"p{number}"), layout)
    assert engine.numbered().count("room") == 2
    # A layout that is new comes once through vLLM's loader.
    assert engine.staged() == [False, True, True, False]


async def test_room_is_asked_for_again_after_a_failure() -> None:
    once = [*RIGHT, rooms(16, 16)]
    engine = Engine(*once, READY, FAILED, *once, *RIGHT, may_stage=True)
    for number in range(4):
        with contextlib.suppress(WeightSyncError):
            await engine.take(order(f"p{number}"))
    assert engine.numbered().count("room") == 2


@pytest.mark.parametrize("hangs_at", ["prepare", "room", "begin", "receive"])
async def test_workers_that_do_not_answer_are_taken_for_dead(
    monkeypatch, hangs_at: str
) -> None:
    engine = Engine(*RIGHT, rooms(0, 0), *RIGHT, may_stage=True)
    await engine.take()

    async def ask(method: str, arguments: tuple[Any, ...]) -> list[Any]:
        if method == hangs_at:
            await asyncio.Event().wait()
        return await engine.ask(method, arguments)

    monkeypatch.setattr(weight_orders, "_LOAD_LIMIT_S", 0.01)
    engine.update._call_all = ask
    soon = order(
        "p2", bucket_deadline_s=0.01, join_deadline_s=0.01, new_communicator=True
    )
    with pytest.raises(EngineDied, match="no answer to a weight update within 0"):
        await engine.take(soon)
