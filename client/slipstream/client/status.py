"""Defines the status and the events of a run as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message
from slipstream.client.terminal import counted
from slipstream.core.types import PolicyVersion
from slipstream.protocol.codec import version_from_pb
from slipstream.v1 import environment_pb2, status_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Mirror = TypeVar("Mirror", bound="DataclassInstance")


@dataclass(frozen=True)
class EvaluationRound:
    """The result of one round of an evaluation."""

    # The version that was measured.
    step: int
    # Results named as in metrics.jsonl, without the evaluation's name: reward_mean, pass_at_1, ...
    numbers: dict[str, float]


@dataclass(frozen=True)
class EnvironmentStatus:
    """The status of one environment or evaluation of a run."""

    name: str
    # Empty if a client serves it.
    reference: str
    weight: float
    # pending, ready or suspended.
    state: str
    # Number of tasks, or 0 if they have no end.
    num_tasks: int
    # Why it is suspended, or what went wrong last.
    cause: str
    groups_accepted: int
    groups_failed: int
    episodes_failed: int
    # Mean reward of the accepted groups.
    reward_mean: float
    # training or evaluation.
    purpose: str
    # The newest complete round of an evaluation; None before its first round, and for training.
    newest_round: EvaluationRound | None


@dataclass(frozen=True)
class ServerStatus:
    """The status of one rollout server; its counts begin at the server's start."""

    server_id: str
    # joining, loading, serving, stale, draining, dead or left.
    state: str
    version: PolicyVersion
    cause: str
    silent_s: float
    leased_groups: int
    open_episodes: int
    generated_tokens: int
    # Sampled tokens of the open episodes.
    in_flight_tokens: int
    # Tokens that vLLM's speculative decoding drafted, and how many of them were accepted.
    drafted_tokens: int
    accepted_tokens: int
    queued_bytes: int
    busy_s: float
    paused_s: float
    uptime_s: float
    # Why the server's engine does without features of options, by their names.
    disabled_features: dict[str, str]


@dataclass(frozen=True)
class Ledger:
    """The numbers of tokens by their fate; `difference` is `generated` less all other counts."""

    generated: int
    trained: int
    filtered: int
    failed: int
    cancelled: int
    quarantined: int
    evaluated: int
    # Tokens of batches that could not be trained.
    set_aside: int
    queued: int
    in_flight: int
    lost: int
    difference: int
    # A line for each hand-over of trajectories whose two sides count differently.
    gaps: tuple[str, ...]


def fates(ledger: Mapping[str, Any]) -> str:
    """Returns what became of the tokens of a ledger, without the fates of none."""
    ends = ("trained", "filtered", "failed", "cancelled", "quarantined", "evaluated", "set_aside")
    names = [name for name in (*ends, "queued", "in_flight", "lost") if ledger[name]]
    counts = ", ".join(f"{name.replace('_', ' ')} {ledger[name]:,}" for name in names) or "none"
    return f"{ledger['generated']:,} = {counts}; difference {ledger['difference']}"


@dataclass(frozen=True)
class RunStatus:
    """The state of a run at one moment."""

    run_id: str
    # starting, running, stopping, finished, failed or stopped.
    state: str
    cause: str
    step: int
    num_steps: int
    max_staleness: int
    waiting_for: str
    leased_groups: int
    complete_groups: int
    queued_bytes: int
    uptime_s: float
    servers: tuple[ServerStatus, ...]
    environments: tuple[EnvironmentStatus, ...]
    ledger: Ledger
    # Metrics of the newest finished step.
    metrics: dict[str, float]
    # The reason why the next lease waits, or empty if it does not wait.
    lease_wait: str
    # Bytes of the queue that are used or that leased episodes may still need.
    reserved_bytes: int
    # The newest version with a reported checkpoint, or 0 if there is none.
    checkpoint_step: int

    @property
    def is_over(self) -> bool:
        return self.state in ("finished", "failed", "stopped")


def episodes_under_way(run: RunStatus) -> str:
    """Returns a line on how far the open episodes are, and how fast, or "" if none is open."""
    episodes = sum(server.open_episodes for server in run.servers)
    if not episodes:
        return ""
    mean = sum(server.in_flight_tokens for server in run.servers) / episodes
    rate = sum(s.generated_tokens / s.busy_s for s in run.servers if s.open_episodes and s.busy_s)
    return (
        f"{counted(episodes, 'episode')} under way, with {mean:,.0f} tokens each so far, at "
        f"{rate:,.0f} tok/s in all"
    )


@dataclass(frozen=True)
class Event:
    """One event of a run; events are numbered in order."""

    number: int
    unix_time_s: float
    # info, warning or error.
    severity: str
    text: str
    # Both are set when a step was finished.
    step: int
    metrics: dict[str, float]
    # finished, failed or stopped; set by the last event of a run only.
    final_state: str


def environment_from_pb(message: environment_pb2.EnvironmentStatus) -> EnvironmentStatus:
    """Returns the status in a message."""
    newest = message.newest_round if message.HasField("newest_round") else None
    return _from_pb(
        EnvironmentStatus,
        message,
        message.spec,
        newest_round=newest and _from_pb(EvaluationRound, newest),
    )


def run_from_pb(message: status_pb2.RunStatus) -> RunStatus:
    """Returns the status in a message."""
    return _from_pb(
        RunStatus,
        message,
        servers=tuple(
            _from_pb(ServerStatus, server, server.report, version=version_from_pb(server.version))
            for server in message.servers
        ),
        environments=tuple(map(environment_from_pb, message.environments)),
        ledger=_from_pb(Ledger, message.ledger, gaps=tuple(message.ledger.gaps)),
    )


def event_from_pb(message: status_pb2.Event) -> Event:
    """Returns the event in a message."""
    return _from_pb(Event, message, **({} if message.final_state else {"final_state": ""}))


def _from_pb(kind: type[Mirror], *messages: Message, **values: object) -> Mirror:
    """Returns a `kind` whose fields are `values`, or else fields of the same name in `messages`.

    A field is read from the first message that has it. An enum becomes its name in lower case,
    without the enum's prefix, or its number as text if this version does not know it. A map becomes
    a dict.
    """
    for field in fields(kind):
        if field.name not in values:
            message = next(m for m in messages if field.name in m.DESCRIPTOR.fields_by_name)
            about = message.DESCRIPTOR.fields_by_name[field.name]
            value = getattr(message, field.name)
            if about.enum_type is not None:
                names = about.enum_type.values_by_number
                prefix = names[0].name.removesuffix("UNSPECIFIED")
                value = names[value].name.removeprefix(prefix) if value in names else value
                value = str(value).lower()
            values[field.name] = value if about.message_type is None else dict(value)
    return kind(**values)
