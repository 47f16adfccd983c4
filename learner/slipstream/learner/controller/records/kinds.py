"""The records of a journal: one class for each kind, whose fields are those of the JSON.

Fields that a resume does not read have a default.
"""

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeAlias

import msgspec
from pydantic import JsonValue
from slipstream.core.types import GroupId, PolicyVersion
from slipstream.protocol.bounds import shown

# Epochs are unsigned numbers of 64 bits, tasks and seeds signed ones.
_MOST = 2**64 - 1

# Name and epoch of a server, and a number of its tokens.
ServerTokens: TypeAlias = tuple[str, int, int]
# Name and epoch of a server, and what `EpochCount.journaled_gaps` returned.
ServerGaps: TypeAlias = tuple[str, int, tuple[int, int, int, int, int]]


class TrajectoryEnd(Enum):
    """The way in which a trajectory ended."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"
    EVALUATED = "evaluated"
    # The trajectory was in a batch that the trainer could not train.
    SET_ASIDE = "set_aside"


class Record(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind"):
    """One record; fields with their default are left out of the JSON."""


class Start(Record, frozen=True, tag="start"):
    """The start of a controller; `machine` and `packages` describe where it runs."""

    format: int
    run_id: str
    # Secret of the run, in hexadecimal.
    key: str = ""
    unix_s: float | None = None
    # Digests of the user's own functions, by name.
    functions: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None
    packages: dict[str, Any] | None = None


class QueueStart(Record, frozen=True, tag="queue"):
    """The number of entries that Redis had ever counted when the controller started."""

    added: int


class GroupLease(Record, frozen=True, tag="lease"):
    """A lease of a group to a server; `replaces` is the group that was abandoned for it."""

    group: GroupId
    environment: str
    # Number of the task in its environment.
    number: int
    task: int
    seed: int
    # The last step whose batch may hold the group.
    deadline: int
    server: str
    epoch: int
    members: list[int] = []
    replaces: GroupId | None = None


class EvaluationLease(Record, frozen=True, tag="evaluation_lease"):
    """A lease of one episode of an evaluation."""

    server: str
    epoch: int
    group: GroupId | None = None
    environment: str | None = None
    task: int | None = None
    version: int | None = None


class End(Record, frozen=True, tag="end"):
    """The end of a trajectory that no batch takes, with its sampled tokens and its server."""

    id: str
    end: TrajectoryEnd
    tokens: int
    server: str
    epoch: int
    cause: str | None = None


class GaveUp(Record, frozen=True, tag="gave_up"):
    """Members of a group that had their last attempt."""

    group: GroupId
    members: list[int]
    cause: str | None = None


class GroupSetAside(Record, frozen=True, tag="set_aside"):
    """The end of a group that failed for good."""

    group: GroupId
    task: int | None = None
    cause: str | None = None
    # Whether its environment has failed: not in an outage, or if the prompt is too long.
    blamed: bool = True


class Closed(Record, frozen=True, tag="closed"):
    """The end of a group that was "filtered" or "withdrawn"; `reward` is its mean reward.

    `seen` are the lowest and the highest reward of its environment so far.
    """

    group: GroupId
    how: str
    cause: str | None = None
    solved: bool | None = None
    reward: float | None = None
    seen: tuple[float, float] | None = None


class StepBatch(Record, frozen=True, tag="batch"):
    """The batch of a step, whose file has this CRC-32."""

    step: int
    batch_id: str
    crc32: int
    groups: list[GroupId]
    trajectories: int
    tokens: list[ServerTokens]
    # The lowest and the highest reward in it, by environment.
    seen: dict[str, tuple[float, float]] = {}
    # Bytes of the file; 0: an older release wrote it, as one message.
    num_bytes: int = 0
    # Seats of the next batch that rounding owes to environments, by name.
    owed: dict[str, float] = {}


class BatchSetAside(Record, frozen=True, tag="batch_set_aside"):
    """A batch that is not trained: `groups` have ended, `put_back` wait for another batch."""

    step: int
    batch_id: str
    # The party that set the batch aside: "trainer" or "user".
    by: str
    # Group, environment, task.
    groups: list[tuple[GroupId, str, int]]
    # Group, environment, task, seed.
    put_back: list[tuple[GroupId, str, int, int]]
    # The trajectories that have ended, and the sum of their tokens.
    ids: list[str]
    tokens: int
    put_back_trajectories: int
    put_back_tokens: list[ServerTokens]
    cause: str | None = None


class Step(Record, frozen=True, tag="step"):
    """The version that the trainer made from a batch, with the digest of its weights."""

    step: int
    version: PolicyVersion
    digest: str
    # Lag, and number of trained tokens of this lag.
    lags: list[tuple[int, int]]
    # Number of trajectories that more than one version sampled.
    several: int
    # Metrics of a step that a client ordered, whose result a kill may lose.
    metrics: dict[str, float] = {}


class Servers(Record, frozen=True, tag="servers"):
    """Token counts of servers by their own reports; each fact that is not there is 0."""

    generated: list[ServerTokens]
    departed: bool = False
    gaps: list[ServerGaps] = []
    # Trajectories and tokens that had ended or were in a batch.
    settled: tuple[int, int] | None = None


class Checkpoint(Record, frozen=True, tag="checkpoint"):
    """A whole checkpoint."""

    version: PolicyVersion
    digest: str | None = None
    path: str | None = None


class Submitted(Record, frozen=True, tag="submitted"):
    """An environment that a client added, with its specification as JSON."""

    environment: str
    spec: str


class Unsubmitted(Record, frozen=True, tag="unsubmitted"):
    """An environment that was submitted and that no server could load."""

    environment: str


class HeadStart(Record, frozen=True, tag="head_start"):
    """The share that counts as given to an environment that joined a running mixture."""

    environment: str
    head_start: float


class Tasks(Record, frozen=True, tag="tasks"):
    """The tasks that an environment has from now on: their number and a digest."""

    environment: str
    num_tasks: int
    digest: str


class TaskResult(Record, frozen=True, tag="task_result"):
    """The rewards of a group that finished, where its environment draws tasks by weights."""

    group: GroupId
    # The mean of the environment's rewards.
    reward: float
    # Episodes with a reward, and those of them that passed.
    episodes: int
    passed: int


class TaskWeights(Record, frozen=True, tag="task_weights"):
    """From here on tasks are drawn by weights, which were made from results up to an event.

    `events` is how many events of the table have been added to its sums since the record before.
    """

    environment: str
    num_tasks: int
    events: int
    # The step whose batch was being formed.
    step: int


class Evaluation(Record, frozen=True, omit_defaults=False, tag="evaluation"):
    """The result of an evaluation round; `reward_mean` is None without an episode."""

    version: int
    episodes: int
    failed: int
    reward_mean: float | None = None
    # The statistics of each evaluation, by name.
    evaluations: dict[str, dict[str, float]] = {}
    wall_s: float = 0.0
    # The checksums of the round's lines in heldout.jsonl.
    replies_crc32: list[int] = []


_KINDS: Mapping[str, type[Record]] = {
    str(kind.__struct_config__.tag): kind for kind in Record.__subclasses__()
}


class UnknownFact(ValueError):
    """Raised for a record that another release wrote: its facts must not be passed over."""


def parsed(record: Mapping[str, JsonValue]) -> Record:
    """Returns a record of JSON.

    Raises UnknownFact if its kind or a field is not known, and ValueError if a field is missing,
    has a wrong type or a number of more than 64 bits.
    """
    name = str(record["kind"])
    kind = _KINDS.get(name)
    if kind is None:
        raise UnknownFact(f"a record {shown(name)}")
    if unknown := record.keys() - {"kind", *kind.__struct_fields__}:
        raise UnknownFact(f"the field {shown(min(unknown))} of a record {shown(name)}")
    for name, value in record.items():
        if type(value) is not str:
            _check_numbers(name, value)
    try:
        return msgspec.convert(record, kind)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at `$.")
        if not place:
            raise
        wrong: Any = record
        for name, index in re.findall(r"(\w+)|\[(\d+)\]", place):
            wrong = wrong[name] if name else wrong[int(index)]
        raise ValueError(f"{place[:-1]} = {shown(str(wrong))}: {rule}") from None


def fields_of(record: Record) -> dict[str, JsonValue]:
    """Returns a record as JSON."""
    fields: dict[str, JsonValue] = msgspec.to_builtins(record)
    return fields


def _check_numbers(name: str, value: JsonValue) -> None:
    if type(value) is int and not -_MOST <= value <= _MOST:
        raise ValueError(f"{name} must fit 64 bits, got a number of {value.bit_length()} bits")
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_numbers(name, item)
