"""The rollout servers: who is connected, in which state, serving which version.

Consumes: the servers' messages. Produces: orders to them.
Waits for: hellos, heartbeats and reports. Unblocked by: a message, or the limit of its wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.learner.controller.events import Severity
from slipstream.learner.controller.loop_clock import LoopClock
from slipstream.learner.controller.progress import RunProgress
from slipstream.learner.controller.servers.outbox import Outbox
from slipstream.learner.controller.servers.server_states import (
    DEAD,
    DRAINING,
    JOINING,
    LEFT,
    SERVING,
    ServerEvent,
    ServerKey,
    next_state,
)
from slipstream.learner.controller.stopwatch import Stopwatch
from slipstream.protocol.types import PolicyVersion, ServerId
from slipstream.v1 import fleet_pb2, status_pb2

# Largest number of departed servers whose last state is told.
MAX_DEPARTED = 1000
PUBLISH_ORDERS = ("prepare", "receive", "commit", "abort", "probe_verdict")


@dataclass(eq=False)
class ServerSession:
    """One connected rollout server."""

    key: ServerKey
    hello: fleet_pb2.ServerHello
    state: fleet_pb2.ServerState = JOINING
    # What it serves, or served last.
    version: PolicyVersion | None = None
    # The publish by which it came there.
    publish_id: str = ""
    cause: str = ""
    report: fleet_pb2.ServerReport = field(default_factory=fleet_pb2.ServerReport)
    # Seconds in which its engine had requests, as all its reports say.
    busy_s: float = 0.0
    # When it joined, by `time.monotonic`.
    began_s: float = field(default_factory=time.monotonic)
    # By it the server is found silent.
    clock: LoopClock = field(default_factory=LoopClock)
    joined_s: float = field(init=False)
    last_seen_s: float = field(init=False)
    outbox: Outbox[fleet_pb2.ControllerMessage] = field(default_factory=Outbox)
    # Not before this moment may a publish be tried again.
    retry_publish_s: float = 0.0
    failed_publishes: int = 0
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    # Time in which it served.
    served: Stopwatch = field(default_factory=Stopwatch)
    # Told of every change of the state.
    changed: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.joined_s = self.last_seen_s = self.clock.now_s()

    @property
    def name(self) -> str:
        """The server's name."""
        return self.key.server_id

    @property
    def silent_s(self) -> float:
        """Seconds since its last message in which it could have been heard."""
        return self.clock.now_s() - self.last_seen_s

    @property
    def is_serving(self) -> bool:
        """Whether it may be leased a group."""
        return self.state == SERVING

    @property
    def is_leaving(self) -> bool:
        """Whether it takes no part in anything new."""
        return self.state in (DRAINING, DEAD, LEFT)

    def on(self, event: ServerEvent) -> None:
        """Moves to the state that follows."""
        self.state = next_state(self.state, event)
        self.served.note(self.clock.now_s(), running=self.is_serving)
        self.changed()

    def send(
        self, message: fleet_pb2.ControllerMessage, after: asyncio.Future[None] | None = None
    ) -> None:
        """Puts an order on its stream; ends the stream of a server that does not read.

        It leaves when `after` is done, and so do those behind it. Orders of a publish do not wait
        for that: the trainer and the other servers would wait too.
        """
        overtakes = message.WhichOneof("message") in PUBLISH_ORDERS
        if not self.outbox.put(message, after=after, overtakes=overtakes):
            self.outbox.close()

    def disconnect(self) -> None:
        """Ends its stream."""
        self.outbox.close()


@dataclass(frozen=True)
class FleetHandlers:
    """Who wants to know what a server says."""

    joined: Callable[[ServerSession], None]
    lost: Callable[[ServerSession], None]
    reported: Callable[[ServerSession, fleet_pb2.ServerReport], None]
    environment: Callable[[ServerSession, fleet_pb2.EnvironmentReport], None]
    publish: Callable[[ServerSession, fleet_pb2.PublishReport], None]
    lease: Callable[[ServerSession, fleet_pb2.LeaseReport], None]
    draining: Callable[[ServerSession], None]


class Fleet:
    """All sessions, by server."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self.clock = progress.clock
        self.sessions: dict[ServerId, ServerSession] = {}
        # Every life of a server that was ever taken in.
        self.known: set[ServerKey] = set()
        # Last known state of servers that left.
        self.departed: dict[ServerId, status_pb2.ServerStatus] = {}
        self.handlers: FleetHandlers | None = None
        self.empty_since_s = progress.clock.now_s()

    def serving(self) -> list[ServerSession]:
        """The servers that may be leased groups."""
        return [session for session in self.sessions.values() if session.is_serving]

    def gauges(self) -> dict[str, float]:
        """What the servers told last; docs/metrics.md says what each name means."""
        reports = [session.report for session in self.sessions.values()]
        return {
            "servers_serving": float(len(self.serving())),
            "servers_draining": float(sum(s.state == DRAINING for s in self.sessions.values())),
            "open_episodes": float(sum(report.open_episodes for report in reports)),
            "waiting_episodes": float(sum(report.waiting_episodes for report in reports)),
            "queued_bytes": float(self.queued_bytes),
            "rollout_rss_bytes": float(max((r.resident_bytes for r in reports), default=0)),
        }

    @property
    def queued_bytes(self) -> int:
        """What waits in the queue, as the servers told last."""
        told = [session.report.queued_bytes for session in self.sessions.values()]
        if self._progress.config.queue.kind == "redis":
            # There is one for all, and each of them tells the whole.
            return max(told, default=0)
        return sum(told)

    def find(self, key: ServerKey | None) -> ServerSession | None:
        """The session of that very life of a server."""
        session = None if key is None else self.sessions.get(key.server_id)
        return session if session is not None and session.key == key else None

    def broadcast(self, message: fleet_pb2.ControllerMessage) -> None:
        """Sends one order to all."""
        for session in self.sessions.values():
            session.send(message)

    def add(self, session: ServerSession) -> None:
        """Takes a server in; an older life of it is over."""
        older = self.sessions.get(session.key.server_id)
        if older is not None:
            older.disconnect()
            self.remove(older, "it was started again")
        self.departed.pop(session.key.server_id, None)
        self.sessions[session.key.server_id] = session
        self.known.add(session.key)
        session.changed = self._note_serving
        self._progress.events.add(f"rollout server {session.name} joined")
        assert self.handlers is not None
        self.handlers.joined(session)
        self._progress.signal.notify()

    def remove(self, session: ServerSession, cause: str) -> None:
        """Lets a server go: what it was running is lost with it."""
        if self.find(session.key) is not session:
            return
        del self.sessions[session.key.server_id]
        has_left = session.drained.is_set()
        session.on(ServerEvent.LEFT if has_left else ServerEvent.LOST)
        self._note_serving()
        if not has_left:
            session.cause = cause
        self.departed.pop(session.key.server_id, None)
        self.departed[session.key.server_id] = describe(session)
        if len(self.departed) > MAX_DEPARTED:
            del self.departed[next(iter(self.departed))]
        if not self.sessions:
            self.empty_since_s = self.clock.now_s()
        if has_left:
            self._tell(f"rollout server {session.name} has left")
        else:
            self._progress.events.add(
                f"rollout server {session.name} is gone: {cause}", Severity.WARNING
            )
        assert self.handlers is not None
        self.handlers.lost(session)
        self._progress.signal.notify()

    def drains(self, session: ServerSession, reason: str) -> None:
        """A server takes nothing new from now on; it leaves when it has ended what it runs."""
        if session.is_leaving:
            return
        session.on(ServerEvent.DRAIN)
        session.cause = reason
        self._tell(f"rollout server {session.name} drains: {reason}")
        warning = self.warn_without(session)
        if warning:
            self._progress.events.add(warning, Severity.WARNING)
        assert self.handlers is not None
        self.handlers.draining(session)
        self._progress.signal.notify()

    def warn_without(self, session: ServerSession) -> str:
        """What the run lacks when a server that drains is gone; empty where others stay."""
        others = [other for other in self.sessions.values() if not other.is_leaving]
        if others or self._progress.is_over:
            return ""
        limit_s = self._progress.config.controller.fleet_timeout_s
        return (
            f"no rollout server stays when {session.name} has left: the run waits for another one "
            f"(slipstream rollout-server), and fails after {limit_s:g} s without "
            "(controller.fleet_timeout_s)"
        )

    def order_drain(self, session: ServerSession, reason: str, *, finish: bool) -> None:
        """Tells a server to leave; `finish`: what runs may end first."""
        order = fleet_pb2.Drain(reason=reason, finish=finish)
        session.send(fleet_pb2.ControllerMessage(drain=order))
        self.drains(session, reason)

    def _note_serving(self) -> None:
        # What the run waits for can only happen while a server serves.
        serves = any(session.is_serving for session in self.sessions.values())
        self._progress.idle.note(self.clock.now_s(), running=serves)

    def served_s(self) -> dict[ServerKey, float]:
        """How long each server has served, in seconds."""
        now_s = self.clock.now_s()
        return {session.key: session.served.total_s(now_s) for session in self.sessions.values()}

    def _tell(self, text: str) -> None:
        # At the end of a run all of them leave: the end itself is told.
        if not self._progress.is_over:
            self._progress.events.add(text)

    def remove_silent(self) -> None:
        """Removes the servers that were silent for too long."""
        limit = self._progress.config.controller.heartbeat_timeout_s
        for session in list(self.sessions.values()):
            silent = session.silent_s
            if silent > limit:
                session.disconnect()
                self.remove(session, f"silent for {silent:.1f} s")

    def receive(self, session: ServerSession, message: fleet_pb2.ServerMessage) -> None:
        """Takes one message of a server to whom it concerns."""
        session.last_seen_s = session.clock.now_s()
        assert self.handlers is not None
        match message.WhichOneof("message"):
            case "heartbeat":
                session.report = message.heartbeat
                self.handlers.reported(session, message.heartbeat)
            case "drained":
                session.report = message.drained
                self.handlers.reported(session, message.drained)
                session.drained.set()
            case "environment":
                self.handlers.environment(session, message.environment)
            case "publish":
                self.handlers.publish(session, message.publish)
            case "lease":
                self.handlers.lease(session, message.lease)
            case "draining":
                self.drains(session, message.draining.reason)


def describe(session: ServerSession) -> status_pb2.ServerStatus:
    """A session as the status call shows it."""
    status = status_pb2.ServerStatus(
        server_id=session.key.server_id,
        server_epoch=session.key.epoch,
        state=fleet_pb2.ServerState.Name(session.state),
        report=session.report,
        cause=session.cause,
        silent_s=session.silent_s,
    )
    if session.version is not None:
        status.version.incarnation, status.version.step = session.version
    return status
