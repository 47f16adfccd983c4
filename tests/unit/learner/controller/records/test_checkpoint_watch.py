"""Checkpoints that vanish under a live run, or are not what a resume would take."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.watch import CheckpointWatch
from support.fakes.small_checkpoints import save_checkpoint
from support.rigs.waiting import until


def texts(events: EventLog) -> list[str]:
    return [event.text for event in events.kept()]


REMOVALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder": (shutil.rmtree, "manifest.json is missing or damaged"),
    "manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "file": (lambda path: (path / "tensors").unlink(), "tensors: No such file or directory"),
    "cut": (lambda path: (path / "tensors").write_bytes(b"w"), "has 1 bytes instead of 7"),
}


@pytest.mark.parametrize(("remove", "lack"), REMOVALS.values(), ids=REMOVALS.keys())
async def test_a_checkpoint_that_is_removed_under_a_live_run_is_told_once(
    tmp_path: Path, remove: Callable[[Path], object], lack: str
) -> None:
    events = EventLog()
    save_checkpoint(tmp_path, 30)
    watch = CheckpointWatch(tmp_path, events, look_s=0.01)
    watch.begin(30)
    path = save_checkpoint(tmp_path, 40)
    watch.saved(40)
    async with asyncio.timeout(60):
        watching = asyncio.ensure_future(watch.watch_forever())
        await asyncio.sleep(0)
        remove(path)
        await until(lambda: texts(events))
        watching.cancel()
    (told,) = texts(events)
    assert told.startswith(f"{path} was removed or damaged under the live run (")
    assert lack in told
    rest = "; remove what is left" if (path / "manifest.json").exists() else ""
    assert told.endswith(f"){rest}: a resume begins from version 30")


async def test_the_last_checkpoint_that_goes_is_told_as_well(tmp_path: Path) -> None:
    events = EventLog()
    watch = CheckpointWatch(tmp_path, events, look_s=0.01)
    for step in (30, 40):
        save_checkpoint(tmp_path, step)
        watch.saved(step)
    async with asyncio.timeout(60):
        watching = asyncio.ensure_future(watch.watch_forever())
        for number, step in enumerate((40, 30), start=1):
            shutil.rmtree(tmp_path / f"step-{step:06d}")
            await until(lambda number=number: len(texts(events)) >= number)
        watching.cancel()
    assert [text.rpartition(": ")[2] for text in texts(events)] == [
        "a resume begins from version 30",
        "a resume begins from the start",
    ]


async def test_the_trainer_removes_old_checkpoints_without_a_word(tmp_path: Path) -> None:
    events = EventLog()
    watch = CheckpointWatch(tmp_path, events, look_s=0.001)
    watch.begin(0)
    watching = asyncio.ensure_future(watch.watch_forever())
    for step in range(1, 60):
        await asyncio.to_thread(save_checkpoint, tmp_path, step, keep_last=1)
        await asyncio.sleep(0.002)
        watch.saved(step)
    watching.cancel()
    assert texts(events) == []


def test_a_start_tells_what_it_passes_over(tmp_path: Path) -> None:
    events = EventLog()
    save_checkpoint(tmp_path, 30)
    CheckpointWatch(tmp_path, events).begin(30)
    assert texts(events) == []
    path = save_checkpoint(tmp_path, 40)
    (path / "manifest.json").unlink()
    CheckpointWatch(tmp_path, events).begin(40)
    assert texts(events) == [
        f"{path} is no whole checkpoint, it has no manifest.json: a resume begins from version 30"
    ]
    shutil.rmtree(path)
    CheckpointWatch(tmp_path, events).begin(40)
    assert texts(events)[1:] == [f"{path} is not there any more: a resume begins from version 30"]
    shutil.rmtree(tmp_path)
    CheckpointWatch(tmp_path, events).begin(40)
    assert texts(events)[2:] == [f"{path} is not there any more: a resume begins from the start"]
