"""Waits that end with an answer, at a deadline, or because their publish is abandoned."""

from __future__ import annotations

import queue
import threading
import time
from typing import TypeVar

Answer = TypeVar("Answer")

LOOK_PERIOD_S = 0.05


def wait_for(
    answers: queue.Queue[Answer], deadline_s: float, abandoned: threading.Event | None
) -> Answer:
    """Returns the next answer; queue.Empty after `deadline_s`, or soon after `abandoned` is set."""
    until_s = time.monotonic() + deadline_s
    while True:
        left_s = until_s - time.monotonic()
        try:
            return answers.get(timeout=max(min(left_s, LOOK_PERIOD_S), 0.0))
        except queue.Empty:
            if left_s <= 0 or (abandoned is not None and abandoned.is_set()):
                raise


def reason(deadline_s: float, abandoned: threading.Event | None) -> str:
    """Returns the reason why a wait ended without an answer, as the end of a sentence."""
    if abandoned is not None and abandoned.is_set():
        return "before one of them was lost"
    return f"within {deadline_s:g} s"
