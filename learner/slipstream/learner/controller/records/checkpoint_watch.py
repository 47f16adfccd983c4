"""The controller's eye on the folder of checkpoints, which it never writes.

Consumes: names and sizes of files. Produces: warnings of checkpoints that are not there any more.
Waits for: its period. Unblocked by: the clock.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from slipstream.learner.controller.events import EventLog, Severity
from slipstream.protocol.checkpoints import (
    MANIFEST_NAME,
    checkpoint_path,
    complete_steps,
    passed_over,
    read_manifest,
)
from slipstream.protocol.errors import CheckpointError

LOOK_S = 2.0


class CheckpointWatch:
    """Says when the newest checkpoint is not what a resume would take, each time once.

    watch.begin(40)  # of the journal; told: what is passed over, or is not there
    watch.saved(50)  # the trainer has reported it
    await watch.watch_forever()  # told when version 50 was removed or lost a file
    """

    def __init__(self, folder: Path, events: EventLog, *, look_s: float = LOOK_S) -> None:
        self._folder = folder
        self._events = events
        self._look_s = look_s
        # The version that a resume would go on from; 0: the start.
        self._newest = 0

    def begin(self, recorded: int) -> None:
        """Looks at the start of a controller, whose journal has a checkpoint of `recorded`."""
        over = passed_over(self._folder)
        self._newest = max(complete_steps(self._folder), default=0)
        for path in over:
            self._warn(f"{path} is no whole checkpoint, it has no {MANIFEST_NAME}")
        if not over and recorded > self._newest:
            self._warn(f"{checkpoint_path(self._folder, recorded)} is not there any more")

    def saved(self, step: int) -> None:
        """Takes the version whose checkpoint the trainer has reported."""
        if step in complete_steps(self._folder):
            self._newest = step

    async def watch_forever(self) -> None:
        """Looks every `look_s`, until it is cancelled."""
        while True:
            await asyncio.sleep(self._look_s)
            expected = self._newest
            trouble = await asyncio.to_thread(_missing, self._folder, expected)
            # Meanwhile a newer one may have been reported.
            if trouble and self._newest == expected:
                whole = complete_steps(self._folder)
                self._newest = max((step for step in whole if step < expected), default=0)
                # A resume would refuse it.
                self._warn(f"{trouble}; remove what is left" if expected in whole else trouble)

    def _warn(self, what: str) -> None:
        base = f"version {self._newest}" if self._newest else "the start"
        self._events.add(f"{what}: a resume goes on from {base}", Severity.WARNING)


def _missing(folder: Path, step: int) -> str:
    """What the checkpoint of version `step` lacks; empty: nothing, or there is a newer one."""
    if not step:
        return ""
    path, lack = checkpoint_path(folder, step), ""
    try:
        for file in read_manifest(path).files:
            found = (path / file.path).stat().st_size
            if found != file.num_bytes:
                lack = f"{file.path} has {found} bytes instead of {file.num_bytes}"
    except CheckpointError:
        lack = f"{MANIFEST_NAME} is missing or damaged"
    except OSError as error:
        lack = f"{error.filename}: {error.strerror}"
    # The trainer removes an old one after a newer one has its name.
    if not lack or max(complete_steps(folder), default=0) > step:
        return ""
    return f"{path} was removed or damaged under the live run ({lack})"
