"""The controller's watch over the folder of checkpoints, which the controller never writes.

Consumes: names and sizes of files. Produces: warnings of checkpoints that are missing.
Waits for: its period. Unblocked by: the clock.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from slipstream.core.errors import CheckpointError
from slipstream.learner.controller.events import EventLog, Severity
from slipstream.protocol.checkpoints import (
    MANIFEST_NAME,
    checkpoint_path,
    complete_steps,
    passed_over,
    read_manifest,
)

LOOK_S = 2.0


class CheckpointWatch:
    """Warns when a resume could not use the newest reported checkpoint, once for each change.

    watch.begin(40)  # the journal names a checkpoint of version 40; warns if it is missing
    watch.saved(50)  # the trainer has reported the checkpoint of version 50
    await watch.watch_forever()  # warns when that checkpoint was removed or lost a file
    """

    def __init__(self, folder: Path, events: EventLog, *, look_s: float = LOOK_S) -> None:
        self._folder = folder
        self._events = events
        self._look_s = look_s
        # The version from which a resume would continue; 0: the start.
        self._newest = 0

    def begin(self, recorded: int) -> None:
        """Checks the folder at the start; the journal's newest checkpoint is of version `recorded`.

        Warns of newer folders that are no whole checkpoints.
        """
        over = passed_over(self._folder)
        self._newest = max(complete_steps(self._folder), default=0)
        for path in over:
            self._warn(f"{path} is no whole checkpoint, it has no {MANIFEST_NAME}")
        if not over and recorded > self._newest:
            self._warn(f"{checkpoint_path(self._folder, recorded)} is not there any more")

    def saved(self, step: int) -> None:
        """Notes that the trainer has reported the checkpoint of version `step`."""
        if step in complete_steps(self._folder):
            self._newest = step

    async def watch_forever(self) -> None:
        """Checks the newest checkpoint every `look_s` seconds until the task is cancelled."""
        while True:
            await asyncio.sleep(self._look_s)
            expected = self._newest
            trouble = await asyncio.to_thread(_missing, self._folder, expected)
            # The trainer may have reported a newer checkpoint meanwhile.
            if trouble and self._newest == expected:
                whole = complete_steps(self._folder)
                self._newest = max((step for step in whole if step < expected), default=0)
                # A resume would refuse a checkpoint that still has its manifest.
                self._warn(f"{trouble}; remove what is left" if expected in whole else trouble)

    def _warn(self, what: str) -> None:
        base = f"version {self._newest}" if self._newest else "the start"
        self._events.add(f"{what}: a resume begins from {base}", Severity.WARNING)


def _missing(folder: Path, step: int) -> str:
    """The fault of the checkpoint of version `step`; empty: none, or a newer checkpoint exists."""
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
    # The trainer removes an old checkpoint once a newer one is complete.
    if not lack or max(complete_steps(folder), default=0) > step:
        return ""
    return f"{path} was removed or damaged under the live run ({lack})"
