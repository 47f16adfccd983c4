"""The status and the events of a run, as plain values."""

from __future__ import annotations

import json
from dataclasses import dataclass

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from pydantic import JsonValue
from slipstream.core.errors import ProtocolError
from slipstream.core.types import PolicyVersion
from slipstream.v1 import environment_pb2, fleet_pb2, status_pb2, trajectory_pb2


@dataclass(frozen=True)
class EvaluationRound:
    """The result of one round of an evaluation."""

    # The version that was measured.
    step: int
    # Results named as in metrics.jsonl, without the evaluation's name: reward_mean, pass_at_1, ...
    numbers: dict[str, float]


@dataclass(frozen=True)
class EnvironmentStatus:
    """One environment of a run."""

    name: str
    # Empty: a client serves it.
    reference: str
    args: dict[str, JsonValue]
    weight: float
    # pending, ready or suspended.
    state: str
    # Number of tasks; 0: they have no end.
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
    # The newest complete round of an evaluation; None before the first one, and for training.
    newest_round: EvaluationRound | None


@dataclass(frozen=True)
class ServerStatus:
    """One rollout server; its counts begin at its start."""

    server_id: str
    # joining, loading, serving, stale, draining, dead or left.
    state: str
    version: PolicyVersion
    cause: str
    silent_s: float
    leased_groups: int
    open_episodes: int
    generated_tokens: int
    # Tokens that were drafted, and those of them that were accepted; see `rollout_server.drafts`.
    drafted_tokens: int
    accepted_tokens: int
    queued_bytes: int
    busy_s: float
    paused_s: float
    uptime_s: float


@dataclass(frozen=True)
class Ledger:
    """The fate of every generated token; `difference` is `generated` less all other counts."""

    generated: int
    trained: int
    filtered: int
    failed: int
    cancelled: int
    quarantined: int
    evaluated: int
    # Tokens of batches that could not be trained.
    set_aside: int
    # Tokens of judges that the run's own servers are.
    judged: int
    queued: int
    in_flight: int
    lost: int
    difference: int


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment."""

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
    # The reason why the next lease waits; empty: it does not wait.
    lease_wait: str
    # Bytes of the queue that are used or that leased episodes may still need.
    reserved_bytes: int
    # The newest version with a reported checkpoint; 0: none.
    checkpoint_step: int

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.state in ("finished", "failed", "stopped")


@dataclass(frozen=True)
class Event:
    """One event of a run; the numbers of events rise by one."""

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
    """The status of an environment from its message; ProtocolError if its arguments are no JSON."""
    try:
        args = json.loads(message.spec.args_json or "{}")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the arguments of an environment are no JSON: {error}") from None
    return EnvironmentStatus(
        name=message.spec.name,
        reference=message.spec.reference,
        args=args,
        weight=message.spec.weight,
        state=_word(environment_pb2.EnvironmentState, message.state, "ENVIRONMENT_STATE_"),
        num_tasks=message.num_tasks,
        cause=message.cause,
        groups_accepted=message.groups_accepted,
        groups_failed=message.groups_failed,
        episodes_failed=message.episodes_failed,
        reward_mean=message.reward_mean,
        purpose=_word(trajectory_pb2.EpisodePurpose, message.spec.purpose, "EPISODE_PURPOSE_"),
        newest_round=_round_from_pb(message) if message.HasField("newest_round") else None,
    )


def _round_from_pb(message: environment_pb2.EnvironmentStatus) -> EvaluationRound:
    found = message.newest_round
    return EvaluationRound(step=found.step, numbers=dict(found.numbers))


def run_from_pb(message: status_pb2.RunStatus) -> RunStatus:
    """The status of a run from its message; raises ProtocolError like `environment_from_pb`."""
    ledger = message.ledger
    return RunStatus(
        run_id=message.run_id,
        state=_word(status_pb2.RunState, message.state, "RUN_STATE_"),
        cause=message.cause,
        step=message.step,
        num_steps=message.num_steps,
        max_staleness=message.max_staleness,
        waiting_for=message.waiting_for,
        leased_groups=message.leased_groups,
        complete_groups=message.complete_groups,
        queued_bytes=message.queued_bytes,
        uptime_s=message.uptime_s,
        servers=tuple(_server_from_pb(server) for server in message.servers),
        environments=tuple(environment_from_pb(entry) for entry in message.environments),
        ledger=Ledger(
            generated=ledger.generated,
            trained=ledger.trained,
            filtered=ledger.filtered,
            failed=ledger.failed,
            cancelled=ledger.cancelled,
            quarantined=ledger.quarantined,
            evaluated=ledger.evaluated,
            set_aside=ledger.set_aside,
            judged=ledger.judged,
            queued=ledger.queued,
            in_flight=ledger.in_flight,
            lost=ledger.lost,
            difference=ledger.difference,
        ),
        metrics=dict(message.metrics),
        lease_wait=message.lease_wait,
        reserved_bytes=message.reserved_bytes,
        checkpoint_step=message.checkpoint_step,
    )


def event_from_pb(message: status_pb2.Event) -> Event:
    """The event of a message."""
    final = message.final_state
    return Event(
        number=message.number,
        unix_time_s=message.unix_time_s,
        severity=_word(status_pb2.Severity, message.severity, "SEVERITY_"),
        text=message.text,
        step=message.step,
        metrics=dict(message.metrics),
        final_state=_word(status_pb2.RunState, final, "RUN_STATE_") if final else "",
    )


def _server_from_pb(message: status_pb2.ServerStatus) -> ServerStatus:
    report = message.report
    return ServerStatus(
        server_id=message.server_id,
        state=_word(fleet_pb2.ServerState, message.state, "SERVER_STATE_"),
        version=PolicyVersion(message.version.incarnation, message.version.step),
        cause=message.cause,
        silent_s=message.silent_s,
        leased_groups=message.leased_groups,
        open_episodes=report.open_episodes,
        generated_tokens=report.generated_tokens,
        drafted_tokens=report.drafted_tokens,
        accepted_tokens=report.accepted_tokens,
        queued_bytes=report.queued_bytes,
        busy_s=report.busy_s,
        paused_s=report.paused_s,
        uptime_s=report.uptime_s,
    )


def _word(kind: EnumTypeWrapper, value: int, prefix: str) -> str:
    """The name of `value` in lower case; its number if only a newer controller knows it."""
    known = value in kind.values()
    return kind.Name(value).removeprefix(prefix).lower() if known else str(value)
