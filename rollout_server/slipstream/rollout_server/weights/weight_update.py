"""A publish seen from the engine: what its workers are asked, in which order, within which time.

Consumes: orders and layouts. Produces: one result of all workers. Waits for: the workers' answers.
Unblocked by: these, or the sum of their own deadlines: then they hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from slipstream.protocol.codec import version_from_pb
from slipstream.protocol.errors import WeightSyncError
from slipstream.protocol.types import PolicyVersion
from slipstream.protocol.weights.buckets import layout_from_pb
from slipstream.rollout_server.inference.generation import EngineDied, LoadedWeights
from slipstream.v1 import weights_pb2

# What an update may take beside its own deadlines before its worker is taken for hung.
_LOAD_LIMIT_S = 120.0
_READY_POLL_S = 0.002

Result = TypeVar("Result")
# Calls a method of all workers; EngineDied, WeightSyncError. Never half of it: when nobody waits
# any more it is still made to its end.
Ask = Callable[[str, tuple[Any, ...]], Awaitable[list[Any]]]
# Freezes all requests between two tokens, so many seconds later than its own limit where an update
# may come first; EngineDied.
Pause = Callable[[float], Awaitable[None]]
# Makes an engine in which nothing runs one of these weights, as late; EngineDied.
TurnOver = Callable[[PolicyVersion, float], Awaitable[None]]


@dataclass(frozen=True)
class LoadResult:
    """How a worker took an update; `receive_s` was spent waiting for buckets.

    `wire_s`: from the first broadcast's start to the end of the last; 0 where it cannot be timed.
    `has_plan`: the next one of this layout is copied by a plan.
    """

    digests: list[str]
    by_plan: bool
    has_plan: bool
    receive_s: float
    load_s: float
    wire_s: float


@dataclass(frozen=True)
class _Announced:
    publish_id: str
    version: PolicyVersion
    limit_s: float
    # Of the communicator and the deadlines: an update like the one before finds all in its place.
    terms: tuple[str, float]


class WeightUpdate:
    """One engine's updates, one after the other."""

    def __init__(self, ask: Ask, pause: Pause, *, stage: bool) -> None:
        """`stage`: workers receive beside the weights that still serve."""
        self._ask, self._pause, self._stage = ask, pause, stage
        # One that stages waits for the buckets beforehand, one that loads takes them in the end: in
        # one communicator they would wait for each other.
        self._all_have_plan = False
        self._announced: _Announced | None = None
        # What the workers have at hand since the last update, which they copied by their plans:
        # membership, memory and views. None: they are told everything anew.
        self._ready_for: tuple[str, float] | None = None
        # The layout of the last update; it hardly ever changes.
        self._layout, self._num_buckets = b"", 0
        self._are_adapters_alone = False
        # The last one with weights: workers that are told of others have no plan for them yet.
        self._weights_layout = b""

    async def prepare(
        self, order: weights_pb2.PublishOrder, layout: weights_pb2.WeightLayout, first_rank: int
    ) -> None:
        """All that an update needs beforehand: membership, memory, views. Generation goes on.

        An empty layout is that of the update before. What is like the update before needs nothing:
        then no worker is asked, and the engine's steps are not held up.
        """
        self._announced = None
        is_given = bool(layout.tensors or layout.adapters)
        described = layout.SerializeToString() if is_given else self._layout
        if not described:
            raise WeightSyncError(f"publish {order.publish_id!r} came without a layout")
        terms = (order.communicator.communicator_id, order.bucket_deadline_s)
        is_known = described == self._layout and not order.new_communicator
        if not is_known or terms != self._ready_for:
            self._ready_for = None
            if described != self._layout:
                # A model of many experts has tens of thousands of tensors.
                buckets = await asyncio.to_thread(layout_from_pb, layout)
                self._layout, self._num_buckets = described, len(buckets)
                self._are_adapters_alone = not layout.tensors
                if layout.tensors and described != self._weights_layout:
                    self._weights_layout, self._all_have_plan = described, False
            stage = self._stage and (self._all_have_plan or self._are_adapters_alone)
            announcement = (order.SerializeToString(), described, first_rank, stage)
            limit_s = order.join_deadline_s + self._limit_s(order)
            await _within(limit_s, self._get_ready(announcement))
        version = version_from_pb(order.version)
        self._announced = _Announced(order.publish_id, version, self._limit_s(order), terms)

    async def receive(self, publish_id: str, turn_over: TurnOver | None = None) -> LoadedWeights:
        """Takes the update that was prepared; the engine stands still then.

        `turn_over`: for an engine in which nothing runs, and that gets no request before somebody
        has judged the update. Where it is copied by plans this does for a pause and its end,
        whatever becomes of the update.
        """
        announced, self._announced = self._announced, None
        if announced is None or announced.publish_id != publish_id:
            raise WeightSyncError(f"publish {publish_id!r} was not prepared")
        # After a failure nobody knows who got how far.
        by_plan, self._all_have_plan, self._ready_for = self._all_have_plan, False, None
        goes_on = by_plan and turn_over is not None
        if by_plan and turn_over is not None:
            pause_s = 0.0
            try:
                await self._carry_out("slipstream_begin", announced.limit_s)
            except WeightSyncError:
                # It is over when those that could begin are not inside it any more.
                with contextlib.suppress(WeightSyncError):
                    await self._carry_out("slipstream_receive", announced.limit_s)
                raise
            # Now the wire is busy. The engine takes calls in the order in which it gets them: what
            # turns it over must not come behind the last bucket.
            _, results = await asyncio.gather(
                turn_over(announced.version, announced.limit_s),
                self._carry_out("slipstream_receive", announced.limit_s),
            )
        elif by_plan:
            # Copies wait on the device for the steps before them, and an engine that was told to
            # pause begins no other.
            pause_s, results = await asyncio.gather(
                self._stand_still(announced.limit_s),
                self._carry_out("slipstream_receive", announced.limit_s),
            )
        else:
            # vLLM's loader takes layers apart: no step may be under way.
            pause_s = await self._stand_still(0.0)
            results = await self._carry_out("slipstream_receive", announced.limit_s)
        if any(result["digests"] != results[0]["digests"] for result in results):
            raise WeightSyncError("the workers of one engine received different bytes")
        self._all_have_plan = all(result["has_plan"] for result in results)
        all_by_plan = all(result["by_plan"] for result in results)
        if all_by_plan and not self._stage:
            self._ready_for = announced.terms
        return LoadedWeights(
            bucket_digests=tuple(bytes.fromhex(digest) for digest in results[0]["digests"]),
            by_plan=all_by_plan,
            pause_s=pause_s,
            receive_s=max(result["receive_s"] for result in results),
            load_s=max(result["load_s"] for result in results),
            # The worker that came last waited for no other one.
            wire_s=min(result["wire_s"] for result in results),
            goes_on=goes_on,
        )

    async def _stand_still(self, update_limit_s: float) -> float:
        """Seconds until it does."""
        begun_s = time.monotonic()
        await self._pause(update_limit_s)
        return time.monotonic() - begun_s

    async def _carry_out(self, method: str, limit_s: float) -> list[Any]:
        return await _within(limit_s, self._answers(method, ()))

    def _limit_s(self, order: weights_pb2.PublishOrder) -> float:
        return order.bucket_deadline_s * self._num_buckets + _LOAD_LIMIT_S

    async def _get_ready(self, announcement: tuple[Any, ...]) -> None:
        # A call waits for the engine's step: where nobody has to be waited for, one is enough.
        ready = all(await self._answers("slipstream_prepare", announcement))
        while not ready:
            await asyncio.sleep(_READY_POLL_S)
            ready = all(await self._answers("slipstream_is_ready", ()))

    async def _answers(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        answers = await self._ask(method, arguments)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise WeightSyncError(errors[0])
        return [answer["value"] for answer in answers]


async def _within(limit_s: float, work: Awaitable[Result]) -> Result:
    try:
        async with asyncio.timeout(limit_s):
            return await work
    except TimeoutError:
        raise EngineDied(f"no answer to a weight update within {limit_s:g} s") from None
