"""Waits that end with an answer, at a deadline, or because their publish is abandoned."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from slipstream.core.errors import WeightSyncError

Answer = TypeVar("Answer")

LOOK_PERIOD_S = 0.05


class Unanswered(Exception):  # noqa: N818 - each caller says in its own error what was not done
    """Raised if a call has no answer in time, or before its publish is abandoned."""


def started(call: Callable[[], Answer], *, name: str) -> Future[Answer]:
    """Runs `call` on a thread of this name; returns the future of its result or exception."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def result_of(ended: Future[Answer]) -> Answer:
    """Returns the result of a call that has ended. Raises WeightSyncError if the call failed."""
    try:
        return ended.result()
    except Exception as error:
        raise WeightSyncError(str(error)) from error


def on_thread(
    call: Callable[[], Answer],
    limit_s: float,
    abandoned: threading.Event | None = None,
    *,
    name: str,
) -> Answer:
    """Runs `call` on a thread; returns its result or raises its exception.

    Raises Unanswered after `limit_s` seconds, or soon after `abandoned` is set. The thread is then
    left running.
    """
    answer = started(call, name=name)
    until_s = time.monotonic() + limit_s
    while True:
        left_s = until_s - time.monotonic()
        # The thread has a moment even if `abandoned` is already set: only a call that has begun can
        # be ended.
        wait((answer,), max(min(left_s, LOOK_PERIOD_S), 0.0))
        if answer.done():
            return answer.result()
        if left_s <= 0 or (abandoned is not None and abandoned.is_set()):
            raise Unanswered


def reason(deadline_s: float, abandoned: threading.Event | None) -> str:
    """Returns why a wait ended without an answer, as the end of an error's sentence."""
    if abandoned is not None and abandoned.is_set():
        return "before one of them was lost"
    return f"within {deadline_s:g} s"
