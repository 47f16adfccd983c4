"""The only place for a trainer in a run: its holder, and when it is free for another trainer.

Consumes: registrations and the streams of `KeepPlace`. Produces: the epoch that calls must show.
Waits for: the end of a trainer's stream. Unblocked by: the end of its connection, or `close`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio
from slipstream.learner.controller.events import Severity
from slipstream.learner.controller.run import Run
from slipstream.protocol.codec import TRAINER_EPOCH
from slipstream.protocol.rich_errors import Reason, abort
from slipstream.v1 import trainer_pb2

# Seconds within which a registered trainer must open the stream that keeps its place.
RESERVED_S = 10.0


class TrainerPlace:
    """The place of one run.

    free -- take() --> reserved -- keep() --> kept -- the last stream ends --> free
                       reserved -- RESERVED_S --> free

    A trainer whose stream ended may come back with its epoch until another one takes the place.
    """

    def __init__(self, run: Run, *, reserved_s: float = RESERVED_S) -> None:
        self._run, self._progress = run, run.progress
        self._reserved_s = reserved_s
        # Secret number of the trainer that registered last. 0 before any has registered.
        self.epoch = 0
        self._holder = ""
        self._streams = 0
        self._reserved_until_s = 0.0
        self._turned_away = ""
        self._closed = asyncio.Event()

    @property
    def is_taken(self) -> bool:
        """Whether the trainer that registered last is connected or may still open its stream."""
        return self._streams > 0 or self._run.clock.now_s() < self._reserved_until_s

    async def check_free(
        self, hello: trainer_pb2.TrainerHello, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Refuses a second trainer while the place is taken; one event names each such trainer."""
        if not self.is_taken:
            return
        newcomer, heard_s = _describe(hello, context), self._progress.trainer_heard_s
        text = (
            f"the trainer of {self._holder} has the place in this run and was heard "
            f"{self._run.clock.now_s() - heard_s:.1f} s ago; end it, or wait until it is gone"
        )
        if newcomer != self._turned_away:
            self._turned_away = newcomer
            self._run.events.add(
                f"a second trainer, of {newcomer}, waits: {text}", Severity.WARNING
            )
        await abort(context, grpc.StatusCode.FAILED_PRECONDITION, text, Reason.PLACE_TAKEN)

    def take(
        self, hello: trainer_pb2.TrainerHello, context: grpc.aio.ServicerContext[Any, Any]
    ) -> int:
        """Gives the place to a trainer; returns the epoch of its calls."""
        self.epoch = secrets.randbits(31) + 1
        self._holder = _describe(hello, context)
        self._reserved_until_s = self._run.clock.now_s() + self._reserved_s
        self._progress.trainer_heard()
        return self.epoch

    async def keep(
        self, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[trainer_pb2.PlaceKept, None]:
        """Keeps the place for as long as the stream is open."""
        await self.check(context)
        self._streams += 1
        self._reserved_until_s = 0.0
        try:
            yield trainer_pb2.PlaceKept()
            await self._closed.wait()
        finally:
            self._streams -= 1

    async def check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Refuses calls of all trainers but the one that registered last."""
        cause, reason = "", Reason.WRONG_STATE
        if not self.epoch:
            cause = "no trainer has registered since the controller was started"
            reason = Reason.NOT_REGISTERED
        elif epoch_of(context) != str(self.epoch):
            cause = "another trainer has taken over"
        if cause:
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, cause, reason)
        self._progress.trainer_heard()

    async def check_loading(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Works like `check`, but accepts a call without an epoch while the place is free.

        A trainer that loads its model has not registered and has no epoch yet.
        """
        if epoch_of(context) or self.is_taken:
            await self.check(context)

    def close(self) -> None:
        """Ends the streams of `keep`."""
        self._closed.set()


def epoch_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The epoch in the metadata of a call. Empty if there is none."""
    metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
    return str(metadata.get(TRAINER_EPOCH, ""))


def _describe(hello: trainer_pb2.TrainerHello, context: grpc.aio.ServicerContext[Any, Any]) -> str:
    return hello.process or context.peer()
