"""Which families are measured side by side."""

from __future__ import annotations

import threading

from families import Rooms


def test_a_family_waits_until_a_gpu_has_room_for_it() -> None:
    rooms = Rooms(2, 100.0)
    began = threading.Event()

    def third() -> None:
        with rooms.take(60.0) as gpu:
            assert gpu == 1
            began.set()

    waiting = threading.Thread(target=third)
    with rooms.take(70.0) as first:
        with rooms.take(50.0) as second:
            assert (first, second) == (0, 1)
            waiting.start()
            assert not began.wait(0.2)
        assert began.wait(10.0)
    waiting.join()


def test_a_family_that_needs_more_than_a_gpu_has_it_alone() -> None:
    rooms = Rooms(1, 100.0)
    with rooms.take(250.0) as gpu:
        assert (gpu, rooms._left) == (0, [0.0])
    assert rooms._left == [100.0]
