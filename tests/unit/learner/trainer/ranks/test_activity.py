"""Signs of life of a trainer: they come while it works, and only then."""

import threading

from slipstream.learner.trainer.ranks.activity import Activity, signs_of_life
from support.rigs.waiting import LIMIT_S

PERIOD_S = 0.01


def test_signs_come_with_work_and_end_with_it() -> None:
    activity = Activity()
    tellings = threading.Semaphore(0)
    with signs_of_life(activity, tellings.release, period_s=PERIOD_S):
        # An activity that has done nothing yet says nothing.
        assert not tellings.acquire(timeout=10 * PERIOD_S)
        for _ in range(3):
            activity.note()
            assert tellings.acquire(timeout=LIMIT_S)
        # A thread that hangs notes nothing more, though its process lives.
        assert not tellings.acquire(timeout=10 * PERIOD_S)
