"""Which families are measured side by side, and how."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import families
import pytest
from families import Rooms
from family_shapes import FAMILIES


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


@pytest.mark.parametrize("name", ["qwen3", "qwen2.5-vl", "qwen3-vl-moe"])
def test_a_family_with_a_tower_replies_behind_images(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def noted(command: list[str], log: Path, **_: object) -> str:
        commands.append(command)
        return ""

    monkeypatch.setattr(families, "run", noted)
    arguments = argparse.Namespace(device="cpu", steps=1, limit_s=1.0)
    families.measure_family(name, tmp_path / "family", Rooms(1, 16.0), arguments)
    assert ("--images" in commands[-1]) == bool(FAMILIES[name].tower)
