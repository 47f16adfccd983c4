"""Which version weights are: on which timeline, when a step is trained again."""

from __future__ import annotations

from slipstream.learner.controller.records.history import RecordedStep
from slipstream.protocol.types import PolicyVersion


def version_of(
    step: int, digest: str, recorded: RecordedStep | None, *, trainer: int, newest: int
) -> PolicyVersion:
    """The version of weights with `digest` that `step` steps made.

    `recorded`: what the journal holds of the step that made them. `trainer`: the timeline of the
    weights before that step; `newest`: the newest one of the run. The same digest is the same
    version. Another one begins a new timeline, unless the trainer is on a newer one than the record
    already: then nothing was expected of it.
    """
    if recorded is None or recorded.version.incarnation < trainer:
        return PolicyVersion(trainer, step)
    if recorded.digest == digest:
        return recorded.version
    return PolicyVersion(newest + 1, step)
