"""Whose the trainer's place is, by a clock that the test sets."""

import dataclasses
from contextlib import aclosing

import pytest
from slipstream.learner.controller.loop_clock import LoopClock
from slipstream.learner.controller.services.trainer_service import RESERVED_S, TrainerPlace
from slipstream.protocol.codec import TRAINER_EPOCH
from slipstream.v1 import trainer_pb2
from support.rigs.publishing_scene import run_of

HELLO = trainer_pb2.TrainerHello(process="host here, process 1")


class SetClock(LoopClock):
    time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


class Refused(Exception):
    """A call ended with this text."""


class Call:
    """The context of a call with an epoch, or without one."""

    def __init__(self, epoch: int = 0) -> None:
        self._epoch = epoch

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(TRAINER_EPOCH, str(self._epoch))] if self._epoch else []

    async def abort(self, code: object, text: str, metadata: object) -> None:
        raise Refused(text)


def place_at(clock: SetClock) -> TrainerPlace:
    return TrainerPlace(dataclasses.replace(run_of(), clock=clock))


async def test_a_place_that_is_not_kept_is_free_after_a_while() -> None:
    clock = SetClock()
    place = place_at(clock)
    place.take(HELLO, Call())
    clock.time_s = RESERVED_S - 0.1
    with pytest.raises(Refused, match="host here, process 1 has the place in this run"):
        await place.check_free(HELLO, Call())
    clock.time_s = RESERVED_S
    await place.check_free(HELLO, Call())


async def test_a_place_is_kept_for_as_long_as_a_stream_is_open() -> None:
    clock = SetClock()
    place = place_at(clock)
    epoch = place.take(HELLO, Call())
    async with aclosing(place.keep(Call(epoch))) as kept:
        await anext(kept)
        clock.time_s = 100 * RESERVED_S
        with pytest.raises(Refused, match="has the place in this run"):
            await place.check_free(HELLO, Call())
    await place.check_free(HELLO, Call())
    # It may come back until another trainer has taken the place.
    await place.check(Call(epoch))
    place.take(HELLO, Call())
    with pytest.raises(Refused, match="another trainer has taken over"):
        await place.check(Call(epoch))
