"""The errors that Slipstream raises, exit codes on which all programs agree, and likely names.

SlipstreamError
├── ConfigError (also ValueError)   a setting, an argument or an address cannot work
├── ProtocolError                   a message that no correct peer sends
├── QueueError
│   └── TrajectoryQueueFull         no room in the queue within the time limit
├── StalenessError                  a trained token would be older than `max_staleness` allows
├── CheckpointError                 a checkpoint is damaged, missing, or of another run
├── WeightSyncError                 a server did not receive all new weights, or their probe failed
├── EnvironmentFailed               an environment gave no usable answer
└── RunFailed                       the run cannot continue
    └── UntrainableBatch            a batch cannot be trained, but another one may be
"""

import difflib
import re
from collections.abc import Iterable, Sequence

from slipstream.v1 import trajectory_pb2

# Programs that check something begin each warning with this; their exit code is 0.
WARNING = "slipstream: warning: "
# What it tells besides, without a verdict.
FACT = "fact: "
# Exit codes; `slipstream run` restarts some programs by them.
DONE = 0
# The program failed; a restart may help.
FAILED = 1
# The program cannot work with these arguments and settings.
USAGE_ERROR = 2
# The program failed in a way that a restart would repeat.
FINAL_ERROR = 3
# The engine did not start, or the model did not load; another start may help.
NOT_STARTED = 4
# A rollout server has left a run that was stopped or has failed, and that may go on later.
RUN_STOPPED = 5
# An agent's call beyond a limit of turns or branches is refused by a message that begins so.
EPISODE_LIMIT = "the episode has reached"


class SlipstreamError(Exception):
    """The base class of all errors that Slipstream raises."""


class ConfigError(SlipstreamError, ValueError):
    """A setting, argument or address cannot work; the message states the value and the rule."""


class ProtocolError(SlipstreamError):
    """A received message breaks the protocol, such as by a wrong length, checksum or version."""


class QueueError(SlipstreamError):
    """The trajectory queue cannot do the requested operation."""


class TrajectoryQueueFull(QueueError):
    """The queue had no room, or its server no answer, within the limit: nothing was stored."""


class StalenessError(SlipstreamError):
    """A token of a batch is older than `max_staleness` allows, which indicates a bug."""


class CheckpointError(SlipstreamError):
    """A checkpoint is damaged, missing, or does not fit the run."""


class WeightSyncError(SlipstreamError):
    """A rollout server did not receive all new weights, or their probe failed."""


class EnvironmentFailed(SlipstreamError):
    """An environment raised, hung, ended, or returned no valid reward; `kind` says which."""

    def __init__(self, kind: trajectory_pb2.FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RunFailed(SlipstreamError):
    """The run stopped before its last step; the message states the cause."""


class UntrainableBatch(RunFailed):
    """The data of a batch cannot be trained; the failed mini-batch has not changed the weights.

    `trajectory_ids` names the trajectories at fault; it is empty if no party can identify them.
    """

    def __init__(self, message: str, trajectory_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.trajectory_ids = tuple(trajectory_ids)


_SERVER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_server_id(name: str) -> bool:
    """Whether a rollout server may have the id `name`."""
    return _SERVER_ID.fullmatch(name) is not None


def check_server_id(name: str) -> str:
    """Returns `name`, the id of a rollout server. Raises ConfigError if the id is not allowed."""
    if not is_server_id(name):
        raise ConfigError(
            "the id of a rollout server has up to 100 letters, digits, '.', '_' and '-', "
            f"got {name[:100]!r}"
        )
    return name


def near_names(name: str, names: Iterable[str], *, cutoff: float = 0.5) -> list[str]:
    """Returns up to three names of `names` that are most like `name`, the best first.

    The similarity of each is at least `cutoff`, where 1 means equal. Names that differ more than
    twice as much as the best one are left out, so that a typing error usually has one suggestion.
    """

    def distance(other: str) -> float:
        return 1 - difflib.SequenceMatcher(None, other, name).ratio()

    near = difflib.get_close_matches(name, names, cutoff=cutoff)
    return [other for other in near if distance(other) <= 2 * distance(near[0])]


def did_you_mean(near: Iterable[str]) -> str:
    """Returns a question that names all of `near`, which must not be empty."""
    *first_names, last = (repr(name) for name in near)
    return (
        f"did you mean {', '.join(first_names)} or {last}?"
        if first_names
        else f"did you mean {last}?"
    )
