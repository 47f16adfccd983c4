"""What an engine's workers are asked for an update, with workers that only answer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from slipstream.core.errors import WeightSyncError
from slipstream.core.types import PolicyVersion
from slipstream.protocol.codec import version_to_pb
from slipstream.protocol.weights.buckets import TensorSpec, layout_to_pb
from slipstream.protocol.weights.deltas import content_name
from slipstream.protocol.weights.digests import bucket_digest
from slipstream.rollout_server.weights.weight_update import WeightUpdate
from slipstream.v1 import weights_pb2

ORDER = weights_pb2.PublishOrder(publish_id="p1", bucket_deadline_s=1.0, join_deadline_s=1.0)
LAYOUT = layout_to_pb([TensorSpec("a", "bfloat16", (4,))], bucket_bytes=1024)
OTHER_LAYOUT = layout_to_pb([TensorSpec("a", "bfloat16", (8,))], bucket_bytes=1024)
NO_LAYOUT = weights_pb2.WeightLayout()


def order(publish_id: str, **changed: Any) -> weights_pb2.PublishOrder:
    """The next publish after `ORDER`."""
    values = {"publish_id": publish_id, "bucket_deadline_s": 1.0, "join_deadline_s": 1.0}
    return weights_pb2.PublishOrder(**values | changed)


def result(
    digest: str = "0a", receive_s: float = 0.5, *, has_plan: bool = True, wire_s: float = 0.1
) -> dict[str, Any]:
    return {
        "digests": [digest],
        "by_plan": True,
        "has_plan": has_plan,
        "receive_s": receive_s,
        "load_s": 0.25,
        "wire_s": wire_s,
        "began_s": 0.0,
        "shares": [],
    }


class Workers:
    """Two of them; `answers` holds what both say to each call but `begin`, in order."""

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self._answers, self.begun = list(answers), both(None)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.marks: list[str] = []
        # The same, with the beginning and the end of each pause.
        self.started: list[str] = []

    async def ask(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        self.calls.append((method.removeprefix("slipstream_"), arguments))
        self.started.append(self.calls[-1][0])
        return self.begun if method == "slipstream_begin" else self._answers.pop(0)

    def numbered(self) -> list[str]:
        """The names of all calls but `begin`, whose end counts as `receive`."""
        names = [name for name, _ in self.calls if name != "begin"]
        return ["receive" if name == "finish" else name for name in names]

    async def pause(self, _: float, mark: str) -> None:
        self.marks.append(mark)
        self.started.append("pause")
        await asyncio.sleep(0.01)
        self.started.append("paused")


def both(value: object) -> list[dict[str, Any]]:
    return [{"value": value}, {"value": value}]


async def test_where_nobody_is_waited_for_one_call_prepares_an_update() -> None:
    workers = Workers(both(True), both(result()))
    update = WeightUpdate(workers.ask, workers.pause, stage=True)
    await update.prepare(ORDER, LAYOUT, 3)
    loaded = await update.receive("p1")
    assert [name for name, _ in workers.calls] == ["prepare", "receive"]
    described = (ORDER.SerializeToString(), LAYOUT.SerializeToString(), 3, False)
    assert workers.calls[0][1] == described
    assert (loaded.bucket_digests, loaded.by_plan) == ((b"\x0a",), True)
    assert (loaded.receive_s, loaded.load_s) == (0.5, 0.25)


async def test_adapters_alone_are_staged_by_workers_without_a_plan_too() -> None:
    workers = Workers(both(True), both(result(has_plan=False)), both(True))
    update = WeightUpdate(workers.ask, workers.pause, stage=True)
    await update.prepare(ORDER, LAYOUT, 3)
    await update.receive("p1")
    alone = layout_to_pb((), 1024, adapters=[TensorSpec("a", "bfloat16", (4,))])
    await update.prepare(ORDER, alone, 3)
    staged = [arguments[3] for name, arguments in workers.calls if name == "prepare"]
    assert staged == [False, True]


async def test_adapters_alone_after_weights_are_another_layout() -> None:
    workers = Workers(both(True), both(result()), both(True), both(result()), both(result()))
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    alone = layout_to_pb((), 1024, adapters=[TensorSpec("a", "bfloat16", (4,))])
    for publish_id, layout in (("p1", LAYOUT), ("p2", alone), ("p3", NO_LAYOUT)):
        await update.prepare(order(publish_id), layout, 3)
        await update.receive(publish_id)
    assert workers.numbered() == ["prepare", "receive"] * 2 + ["receive"]
    prepared = [arguments for name, arguments in workers.calls if name == "prepare"]
    assert prepared[1][1] == alone.SerializeToString()


async def test_an_update_like_the_one_before_asks_the_workers_once() -> None:
    workers = Workers(both(True), both(result()), both(result()), both(result()))
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    for publish_id, layout in (("p1", LAYOUT), ("p2", LAYOUT), ("p3", NO_LAYOUT)):
        await update.prepare(order(publish_id), layout, 3)
        await update.receive(publish_id)
    assert workers.numbered() == ["prepare", *3 * ["receive"]]


@pytest.mark.parametrize(
    ("changed", "layout", "stage"),
    [
        ({"new_communicator": True}, LAYOUT, False),
        ({"communicator": weights_pb2.Communicator(communicator_id="other")}, LAYOUT, False),
        ({"bucket_deadline_s": 2.0}, LAYOUT, False),
        ({}, OTHER_LAYOUT, False),
        ({}, LAYOUT, True),
    ],
)
async def test_whatever_is_new_is_prepared(
    changed: dict[str, Any], layout: weights_pb2.WeightLayout, stage: bool
) -> None:
    workers = Workers(both(True), both(result()), both(True), both(result()))
    update = WeightUpdate(workers.ask, workers.pause, stage=stage)
    await update.prepare(ORDER, LAYOUT, 3)
    await update.receive("p1")
    await update.prepare(order("p2", **changed), layout, 3)
    await update.receive("p2")
    assert workers.numbered() == 2 * ["prepare", "receive"]
    assert workers.calls[2][1][1] == layout.SerializeToString()


@pytest.mark.parametrize(
    "unlike",
    [
        [{"value": result()}, {"error": "a bucket did not arrive"}],
        [{"value": result("0a")}, {"value": result("0b")}],
        [{"value": result()}, {"value": {**result(), "by_plan": False}}],
    ],
)
async def test_an_update_after_one_that_was_not_copied_everywhere_is_prepared(
    unlike: list[dict[str, Any]],
) -> None:
    workers = Workers(both(True), unlike, both(True))
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    await update.prepare(ORDER, LAYOUT, 3)
    with contextlib.suppress(WeightSyncError):
        await update.receive("p1")
    await update.prepare(order("p2"), NO_LAYOUT, 3)
    assert [name for name, _ in workers.calls] == ["prepare", "receive", "prepare"]
    assert workers.calls[2][1][1] == LAYOUT.SerializeToString()


async def test_the_first_update_needs_a_layout() -> None:
    workers = Workers()
    with pytest.raises(WeightSyncError, match="'p1' came without a layout"):
        await WeightUpdate(workers.ask, workers.pause, stage=False).prepare(ORDER, NO_LAYOUT, 1)


async def test_copies_begin_while_the_engine_pauses_and_loading_when_it_stands_still() -> None:
    loaded = both({**result(), "by_plan": False})
    workers = Workers(both(True), loaded, both(True), both(result()))
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    await update.prepare(ORDER, LAYOUT, 1)
    first = await update.receive("p1")
    assert workers.started == ["prepare", "pause", "paused", "receive"]
    del workers.started[:]
    await update.prepare(ORDER, LAYOUT, 1)
    second = await update.receive("p1")
    # The device copies while the engine hands out outputs and preempts requests.
    assert workers.started == ["prepare", "pause", "begin", "finish", "paused"]
    assert min(first.pause_s, second.pause_s) >= 0.01


async def test_long_results_come_through_vllm() -> None:
    tensors = [TensorSpec(f"layer {number}", "bfloat16", (512,)) for number in range(257)]
    # vLLM's calls reach the engine's own thread, which must not wait there while it pauses.
    for layout, last in (
        (layout_to_pb(tensors, bucket_bytes=1024), ["paused", "receive"]),
        (layout_to_pb(tensors[:256], bucket_bytes=1024), ["finish", "paused"]),
    ):
        workers = Workers(*2 * [both(True), both(result())])
        update = WeightUpdate(workers.ask, workers.pause, stage=False)
        for publish_id in ("p1", "p2"):
            del workers.started[:]
            await update.prepare(order(publish_id, new_communicator=True), layout, 1)
            await update.receive(publish_id)
        assert workers.started == ["prepare", "pause", "begin", *last]


@pytest.mark.parametrize(("number", "last"), [(2048, "finish"), (2049, "receive")])
async def test_long_results_of_deltas_come_through_vllm(number: int, last: str) -> None:
    # A share names each tensor of its bucket.
    tensors = [TensorSpec(f"expert {place}", "bfloat16", (4,)) for place in range(number)]
    layout = layout_to_pb(tensors, bucket_bytes=1 << 20)
    patched = shared(SHARE, digests=[], by_plan=True)
    whole = both(result(WHOLE.hex()))
    workers = Workers(both(True), shared(SHARE), both(True), patched, both(True), whole)
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    for told in (ORDER, delta("p2", WHOLE), order("p3")):
        await update.prepare(told, layout, 3)
        await update.receive(told.publish_id)
    names = [name for name, _ in workers.calls if name not in ("prepare", "begin")]
    assert names == ["receive", last, "finish"]


@pytest.mark.parametrize("stage", [False, True])
async def test_weights_of_another_layout_are_loaded_when_the_engine_stands_still(
    stage: bool,
) -> None:
    loaded = both({**result(), "by_plan": False})
    workers = Workers(both(True), loaded, both(True), loaded)
    update = WeightUpdate(workers.ask, workers.pause, stage=stage)
    for publish_id, layout in (("p1", LAYOUT), ("p2", OTHER_LAYOUT)):
        del workers.started[:]
        await update.prepare(order(publish_id), layout, 1)
        await update.receive(publish_id)
        assert workers.started == ["prepare", "pause", "paused", "receive"]
    assert [arguments[-1] for name, arguments in workers.calls if name == "prepare"] == 2 * [False]


async def test_weights_are_copied_again_after_adapters_alone() -> None:
    alone = layout_to_pb((), 1024, adapters=[TensorSpec("a", "bfloat16", (4,))])
    workers = Workers(*(3 * [both(True), both(result())]))
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    for publish_id, layout in (("p1", LAYOUT), ("p2", alone), ("p3", LAYOUT)):
        del workers.started[:]
        await update.prepare(order(publish_id), layout, 1)
        await update.receive(publish_id)
    assert workers.started == ["prepare", "pause", "begin", "finish", "paused"]


async def test_only_an_update_that_is_copied_needs_no_pause_of_an_idle_engine() -> None:
    loaded = both({**result(), "by_plan": False})
    workers = Workers(both(True), loaded, both(True), both(result()))
    update = WeightUpdate(workers.ask, workers.pause, stage=False)

    async def resume_idle(version: PolicyVersion, _: float) -> None:
        workers.started.append(f"turn over to {version}")

    for step in (1, 2):
        version = version_to_pb(PolicyVersion(3, step))
        await update.prepare(order(f"p{step}", version=version), LAYOUT, 1)
        await update.receive(f"p{step}", resume_idle)
    assert workers.started[:4] == ["prepare", "pause", "paused", "receive"]
    turned = f"turn over to {PolicyVersion(3, 2)}"
    assert workers.started[4:] == ["prepare", "begin", turned, "finish"]


@pytest.mark.parametrize("is_busy", [False, True])
async def test_an_update_that_could_not_begin_fails_with_that_error(is_busy: bool) -> None:
    errors = [{"value": None}, {"error": "a bucket did not arrive"}]
    late = [{"error": "no update was announced"}, {"error": "no update was announced"}]
    workers = Workers(both(True), both(result()), both(True), late)
    workers.begun = errors
    update = WeightUpdate(workers.ask, workers.pause, stage=False)

    async def resume_idle(*_: object) -> None:
        pass

    await update.prepare(ORDER, LAYOUT, 1)
    await update.receive("p1")
    await update.prepare(order("p2", new_communicator=True), LAYOUT, 1)
    with pytest.raises(WeightSyncError, match="a bucket did not arrive"):
        await update.receive("p2", None if is_busy else resume_idle)
    assert workers.numbered() == 2 * ["prepare", "receive"]


async def test_a_failed_update_is_over_when_no_worker_is_inside_it_any_more() -> None:
    errors = [{"value": None}, {"error": "a bucket did not arrive"}]
    workers = Workers(both(True), both(result()), both(True), both(result()))
    workers.begun = errors
    is_asked, is_over = asyncio.Event(), asyncio.Event()

    async def ask(method: str, arguments: tuple[Any, ...]) -> list[Any]:
        if method == "slipstream_finish":
            is_asked.set()
            await is_over.wait()
            return [{"error": "no update was announced"}, {"error": "a member is gone"}]
        return await workers.ask(method, arguments)

    async def resume_idle(*_: object) -> None:
        pass

    update = WeightUpdate(ask, workers.pause, stage=False)
    await update.prepare(ORDER, LAYOUT, 1)
    await update.receive("p1")
    await update.prepare(order("p2", new_communicator=True), LAYOUT, 1)
    receiving = asyncio.create_task(update.receive("p2", resume_idle))
    await is_asked.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not receiving.done()
    is_over.set()
    with pytest.raises(WeightSyncError, match="a bucket did not arrive"):
        await receiving


async def test_it_is_asked_until_every_worker_is_ready() -> None:
    half = [{"value": True}, {"value": False}]
    workers = Workers(half, both(False), both(True))
    await WeightUpdate(workers.ask, workers.pause, stage=False).prepare(ORDER, LAYOUT, 1)
    assert [name for name, _ in workers.calls] == ["prepare", "is_ready", "is_ready"]


async def test_an_error_of_one_worker_is_raised() -> None:
    workers = Workers(both(True), [{"value": result()}, {"error": "a bucket did not arrive"}])
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    await update.prepare(ORDER, LAYOUT, 1)
    with pytest.raises(WeightSyncError, match="a bucket did not arrive"):
        await update.receive("p1")
    with pytest.raises(WeightSyncError, match="'p1' was not prepared"):
        await update.receive("p1")


async def test_workers_that_received_different_bytes_fail_the_update() -> None:
    workers = Workers(both(True), [{"value": result("0a")}, {"value": result("0b")}])
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    await update.prepare(ORDER, LAYOUT, 1)
    with pytest.raises(WeightSyncError, match="different bytes"):
        await update.receive("p1")


async def test_workers_stage_only_when_all_of_them_have_a_plan() -> None:
    failed: list[dict[str, Any]] = [{"value": result()}, {"error": "a bucket did not arrive"}]
    one_loads: list[dict[str, Any]] = [
        {"value": result()},
        {"value": result(has_plan=False)},
    ]
    workers = Workers(
        *(both(True), failed),
        *(both(True), both(result())),
        *(both(True), one_loads),
        *(both(True), both(result())),
    )
    update = WeightUpdate(workers.ask, workers.pause, stage=True)
    await update.prepare(ORDER, LAYOUT, 1)
    with pytest.raises(WeightSyncError, match="a bucket did not arrive"):
        await update.receive("p1")
    for _ in range(3):
        await update.prepare(ORDER, LAYOUT, 1)
        await update.receive("p1")
    staged = [arguments[-1] for name, arguments in workers.calls if name == "prepare"]
    assert staged == [False, False, True, False]


async def test_the_slowest_worker_gives_the_times() -> None:
    slow = result(receive_s=2.0, wire_s=0.3)
    workers = Workers(both(True), [{"value": result()}, {"value": slow}])
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    await update.prepare(ORDER, LAYOUT, 1)
    loaded = await update.receive("p1")
    assert loaded.receive_s == 2.0
    # In the longer time one worker waited for the other.
    assert loaded.wire_s == 0.1


SUMS = bytes(range(1, 17)).hex()
SHARE = [(SUMS, "01" * 8)]
WHOLE = bucket_digest([bytes.fromhex(SUMS)])


def delta(publish_id: str, base: bytes) -> weights_pb2.PublishOrder:
    return order(publish_id, delta=weights_pb2.Delta(base=content_name([base]), changed=[1]))


def shared(shares: list[tuple[str, str]], **changed: Any) -> list[dict[str, Any]]:
    """What two workers say that hold the same share."""
    return both({**result(WHOLE.hex()), "by_plan": False, "shares": shares, **changed})


async def test_a_delta_follows_an_update_whose_shares_add_up_to_it() -> None:
    patched = shared(SHARE, digests=[], by_plan=True)
    workers = Workers(both(True), shared(SHARE), both(True), patched, both(True), patched)
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    await update.prepare(ORDER, LAYOUT, 3)
    assert (await update.receive("p1")).takes_deltas
    for publish_id in ("p2", "p3"):
        told = delta(publish_id, WHOLE)
        await update.prepare(told, NO_LAYOUT, 3)
        loaded = await update.receive(publish_id)
        assert (loaded.bucket_digests, loaded.takes_deltas) == ((WHOLE,), True)
        # Its sizes are new each time: the workers are told.
        assert workers.calls[-3][1][0] == told.SerializeToString()
    assert workers.numbered() == 3 * ["prepare", "receive"]


async def test_everything_is_prepared_anew_after_a_delta() -> None:
    patched = shared(SHARE, digests=[], by_plan=True)
    copied = both(result(WHOLE.hex()))
    workers = Workers(both(True), shared(SHARE), both(True), patched, both(True), copied)
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    for told in (ORDER, delta("p2", WHOLE), order("p3")):
        await update.prepare(told, LAYOUT, 3)
        loaded = await update.receive(told.publish_id)
    assert workers.numbered() == 3 * ["prepare", "receive"]
    assert loaded.takes_deltas


@pytest.mark.parametrize("shares", [[], [("00" * 16, "01" * 8)]])
async def test_no_delta_follows_where_shares_are_unknown_or_wrong(
    shares: list[tuple[str, str]],
) -> None:
    workers = Workers(both(True), shared(shares))
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    await update.prepare(ORDER, LAYOUT, 3)
    assert not (await update.receive("p1")).takes_deltas
    with pytest.raises(WeightSyncError, match="'p2' changes weights that are not here"):
        await update.prepare(delta("p2", WHOLE), NO_LAYOUT, 3)


async def test_a_delta_on_other_weights_is_refused() -> None:
    workers = Workers(both(True), shared(SHARE))
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    await update.prepare(ORDER, LAYOUT, 3)
    await update.receive("p1")
    with pytest.raises(WeightSyncError, match="'p2' changes weights that are not here"):
        await update.prepare(delta("p2", b"other"), NO_LAYOUT, 3)


async def test_no_delta_follows_a_failed_one() -> None:
    failed = [{"value": result()}, {"error": "a bucket did not arrive"}]
    workers = Workers(both(True), shared(SHARE), both(True), failed)
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    await update.prepare(ORDER, LAYOUT, 3)
    await update.receive("p1")
    await update.prepare(delta("p2", WHOLE), NO_LAYOUT, 3)
    with pytest.raises(WeightSyncError, match="did not arrive"):
        await update.receive("p2")
    with pytest.raises(WeightSyncError, match="'p3' changes weights that are not here"):
        await update.prepare(delta("p3", WHOLE), NO_LAYOUT, 3)


async def test_the_shares_of_a_delta_that_differ_count_once_each() -> None:
    halves = [("01" + "00" * 15, "01" * 8), ("02" + "00" * 15, "02" * 8)]
    found = [
        {"value": {**result(), "digests": [], "shares": [half]}} for half in (*halves, halves[0])
    ]
    whole = bucket_digest([bytes.fromhex("03" + "00" * 15)])
    workers = Workers(both(True), shared(SHARE), both(True), found)
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    await update.prepare(ORDER, LAYOUT, 3)
    await update.receive("p1")
    await update.prepare(delta("p2", WHOLE), NO_LAYOUT, 3)
    assert (await update.receive("p2")).bucket_digests == (whole,)


def rooms(*sizes: int) -> list[dict[str, Any]]:
    return [{"value": size} for size in sizes]


# A bucket's size is a multiple of 16.
@pytest.mark.parametrize(
    ("is_busy", "room", "staged"),
    [(True, (16, 17), True), (True, (17, 15), False), (False, (), False)],
)
async def test_auto_stages_while_requests_run_where_all_workers_have_room(
    is_busy: bool, room: tuple[int, ...], staged: bool
) -> None:
    answers = [both(True), both(result())]
    answers += [rooms(*room)] if room else []
    answers += [both(True)] if staged else []
    workers = Workers(*answers, both(result()))
    update = WeightUpdate(workers.ask, workers.pause, stage="auto")
    await update.prepare(ORDER, LAYOUT, 1, is_busy=True)
    assert not (await update.receive("p1")).staged
    await update.prepare(order("p2"), NO_LAYOUT, 1, is_busy=is_busy)
    assert (await update.receive("p2")).staged is staged
    told = [arguments[-1] for name, arguments in workers.calls if name == "prepare"]
    assert told == ([False, True] if staged else [False])


async def test_workers_are_asked_for_room_once_for_a_layout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    staged = [both(True), both(result())]
    workers = Workers(*staged, rooms(100, 90), *staged, *staged, *staged, rooms(100, 10), staged[1])
    update = WeightUpdate(workers.ask, workers.pause, stage="auto")
    for publish_id in ("p1", "p2", "p3"):
        await update.prepare(order(publish_id), LAYOUT, 1)
        await update.receive(publish_id)
    for publish_id in ("p4", "p5"):
        await update.prepare(order(publish_id), OTHER_LAYOUT, 1)
        await update.receive(publish_id)
    assert [name for name, _ in workers.calls].count("room") == 2
    told = [arguments[-1] for name, arguments in workers.calls if name == "prepare"]
    # A layout that is new comes once through vLLM's loader.
    assert told == [False, True, True, False]
    said = [record.message for record in caplog.records if "new weights arrive" in record.message]
    assert len(said) == 2
    assert "beside those that serve" in said[0]
    assert "while requests wait" in said[1]


async def test_room_is_asked_for_again_after_a_failure() -> None:
    failed = [{"value": result()}, {"error": "a bucket did not arrive"}]
    right = [both(True), both(result())]
    workers = Workers(
        *(*right, rooms(16, 16), both(True), failed),
        *(*right, rooms(16, 16), *right),
    )
    update = WeightUpdate(workers.ask, workers.pause, stage="auto")
    for publish_id in ("p1", "p2", "p3", "p4"):
        with contextlib.suppress(WeightSyncError):
            await update.prepare(order(publish_id), LAYOUT, 1)
            await update.receive(publish_id)
    assert [name for name, _ in workers.calls].count("room") == 2


async def test_an_idle_engine_is_not_asked_after_one_that_was_staged_twice() -> None:
    right = [both(True), both(result())]
    workers = Workers(*right, rooms(16, 16), *right, *right, both(result()))
    update = WeightUpdate(workers.ask, workers.pause, stage="auto")
    for publish_id, is_busy in (("p1", True), ("p2", True), ("p3", False), ("p4", False)):
        await update.prepare(order(publish_id), LAYOUT, 1, is_busy=is_busy)
        await update.receive(publish_id)
    twice = 2 * ["prepare", "receive"]
    assert workers.numbered() == ["prepare", "receive", "room", *twice, "receive"]


async def test_the_copies_begin_where_the_first_worker_began() -> None:
    first, second = ({**result(), "began_s": began_s} for began_s in (3.5, 3.25))
    workers = Workers(both(True), [{"value": first}, {"value": second}])
    update = WeightUpdate(workers.ask, workers.pause, stage=False)
    await update.prepare(ORDER, LAYOUT, 1)
    assert (await update.receive("p1")).began_s == 3.25
