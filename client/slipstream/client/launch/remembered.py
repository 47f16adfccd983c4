"""Remembers in a run's folder which environments have passed their checks a short time ago.

A command that is given again, such as by a supervisor, need not start all of their programs again.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from slipstream.client.read_files import State, state_of
from slipstream.core.machine.files import replace_file
from slipstream.core.run_folder import LOGS
from slipstream.protocol.release import RELEASE

# Seconds for which a check that has passed is not made again.
REMEMBERED_S = 600.0
NAME = "preflight.json"


class Passed(BaseModel):
    """A check that has passed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Seconds since 1970.
    ended_s: float
    # The files that it read, none of which may have changed.
    files: dict[str, State]
    # The lines that it printed.
    lines: tuple[str, ...]

    def holds(self, now_s: float) -> bool:
        """Whether the check would read the same, and is not long ago."""
        age_s = now_s - self.ended_s
        if not 0 <= age_s < REMEMBERED_S:
            return False
        present = {name: state_of(name) for name in self.files}
        return present == self.files


class _PassedChecks(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    checks: dict[str, Passed]


class Remembered:
    """The checks of a run's folder that have passed, by their keys."""

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / LOGS / NAME
        self._passed: dict[str, Passed] = {}
        try:
            record = _PassedChecks.model_validate_json(self._path.read_bytes())
        except (OSError, ValidationError):
            return
        now_s = time.time()
        for key, passed in record.checks.items():
            if passed.holds(now_s):
                self._passed[key] = passed

    def recall(self, key: str) -> Passed | None:
        """Returns the check of this key that has passed and holds, or None."""
        return self._passed.get(key)

    def add(self, key: str, lines: Sequence[str], files: Mapping[str, State]) -> None:
        """Takes a check that has just passed; without any file nothing could tell a change."""
        if files:
            self._passed[key] = Passed(
                ended_s=time.time(),
                files=dict(files),
                lines=tuple(lines),
            )

    def save(self) -> None:
        """Replaces what the run's folder, which has a folder of logs, remembers; raises OSError."""
        record = _PassedChecks(checks=self._passed)
        text = record.model_dump_json()
        replace_file(self._path, text.encode())


def key_of(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Returns what tells one check from another: its release, command and variables."""
    variables = sorted(environ.items())
    text = json.dumps([RELEASE, list(command), variables])
    digest = hashlib.sha256(text.encode())
    return digest.hexdigest()
