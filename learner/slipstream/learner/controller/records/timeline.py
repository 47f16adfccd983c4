"""The timeline and version of weights when a step is trained again."""

from __future__ import annotations

from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.records.history import RecordedStep


def version_of(
    step: int, digest: str, recorded: RecordedStep | None, *, trainer: int, newest: int
) -> PolicyVersion:
    """The version of weights with `digest` that `step` steps made.

    `recorded`: the journal's record of that step. `trainer`: the timeline of the weights before the
    step; `newest`: the newest timeline of the run. The same digest gives the recorded version.
    Another digest begins a new timeline, unless the trainer's timeline is newer than the record's.
    """
    if recorded is None or recorded.version.incarnation < trainer:
        return PolicyVersion(trainer, step)
    if recorded.digest == digest:
        return recorded.version
    return PolicyVersion(newest + 1, step)
