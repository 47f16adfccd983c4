"""The connected rollout servers, with their states and served versions.

Consumes: the servers' messages. Produces: orders to them. Waits for: hellos, heartbeats and
reports. Unblocked by: a message, or the limit of its wait.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial

from slipstream.core.extension import queues
from slipstream.core.types import PolicyVersion, ServerId
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.session import (
    DEAD,
    DRAINING,
    LEFT,
    LOADING,
    SERVING,
    ServerKey,
    ServerSession,
    describe,
)
from slipstream.v1 import environment_pb2, fleet_pb2, status_pb2

# Largest number of departed servers whose last state the status shows; each answer copies them.
MAX_DEPARTED = 100
# Heartbeats of the whole fleet per second, above which a server that joins sends fewer.
MAX_HEARTBEATS_PER_S = 128


class ServerListener:
    """A part that hears of servers: it overrides the methods for what it handles."""

    def joined(self, session: ServerSession) -> None:
        """Handles a server that has joined."""

    def reported(self, session: ServerSession, report: fleet_pb2.ServerReport) -> None:
        """Handles the counters of a server."""

    def drains(self, session: ServerSession) -> None:
        """Handles a server that gets no new work from now on."""

    def rested(self, session: ServerSession, answer: fleet_pb2.Rested) -> None:
        """Handles an engine that rests."""

    def environment_reported(
        self, session: ServerSession, report: fleet_pb2.EnvironmentReport
    ) -> None:
        """Handles a server's report that it has loaded an environment or cannot run it."""

    def publish_reported(self, session: ServerSession, report: fleet_pb2.PublishReport) -> None:
        """Handles a server's answer or its report on a phase of a publish."""

    def lease_reported(self, session: ServerSession, report: fleet_pb2.LeaseReport) -> None:
        """Handles a lease that a server has closed."""

    def lost(self, session: ServerSession) -> None:
        """Handles a server that is gone, in order or not."""


class Fleet:
    """The sessions of all connected rollout servers, one for each server.

    Life of a session: `add` at the server's hello, `receive` for each message, `drains` when the
    server takes no new work, `remove` at the end of its stream; `listeners` are told of each. A
    server that joins again replaces its older session.
    """

    def __init__(self, run: ControlledRun) -> None:
        self._run = run
        self._progress = run.progress
        self.clock = run.clock
        self.sessions: dict[ServerId, ServerSession] = {}
        # The version of each server that serves, and the number of these servers by version.
        self._serving: dict[ServerKey, PolicyVersion] = {}
        self.versions: Counter[PolicyVersion] = Counter()
        self.epochs = ServerEpochs()
        # Last known state of servers that left or were lost.
        self.departed: dict[ServerId, status_pb2.ServerStatus] = {}
        # Set before the first server joins.
        self.listeners: Sequence[ServerListener] = ()
        # Servers that keep their version, because an evaluation runs on them.
        self.pinned: set[ServerKey] = set()
        self.empty_since_s = run.clock.now_s()
        # Times that a server was lost before it had drained.
        self.num_lost = 0

    @property
    def heartbeat_s(self) -> float:
        """Seconds between the heartbeats of a server that joins now; longer in a large fleet."""
        settings = self._run.config.controller
        shared_s = len(self.sessions) / MAX_HEARTBEATS_PER_S
        return min(max(settings.heartbeat_s, shared_s), settings.heartbeat_timeout_s / 3)

    def serving(self) -> list[ServerSession]:
        """Returns the servers that may be leased groups."""
        return [session for session in self.sessions.values() if session.is_serving]

    def working(self) -> list[ServerSession]:
        """Returns the servers that serve, or take the weights with which they will."""
        return [s for s in self.sessions.values() if s.state in (LOADING, SERVING)]

    def gauges(self) -> dict[str, float]:
        """Returns metrics of the fleet, from the servers' newest reports; see docs/metrics.md."""
        reports = [session.report for session in self.sessions.values()]
        return {
            "servers_serving": float(len(self.serving())),
            "servers_draining": float(sum(s.state == DRAINING for s in self.sessions.values())),
            "open_episodes": float(sum(report.open_episodes for report in reports)),
            "waiting_episodes": float(sum(report.waiting_episodes for report in reports)),
            "drafted_tokens": float(sum(report.drafted_tokens for report in reports)),
            "accepted_tokens": float(sum(report.accepted_tokens for report in reports)),
            "queued_bytes": float(self.queued_bytes),
            "rollout_rss_bytes": float(max((r.resident_bytes for r in reports), default=0)),
        }

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait in the queue, according to the servers' newest reports."""
        queued_bytes = [session.report.queued_bytes for session in self.sessions.values()]
        if queues()[self._run.config.queue.kind].is_shared:
            return max(queued_bytes, default=0)
        return sum(queued_bytes)

    def find(self, key: ServerKey | None) -> ServerSession | None:
        """Returns the session of the server and epoch in `key`, or None if it is not connected."""
        session = None if key is None else self.sessions.get(key.server_id)
        return session if session is not None and session.key == key else None

    def broadcast(self, message: fleet_pb2.ControllerMessage) -> None:
        """Sends one order to all servers."""
        for session in self.sessions.values():
            session.send(message)

    def unload(self, spec: environment_pb2.EnvironmentSpec) -> None:
        """Tells all servers to end the workers of an environment, if they have any."""
        order = fleet_pb2.EnvironmentOrder(spec=spec, unload=True)
        self.broadcast(fleet_pb2.ControllerMessage(environment=order))

    def add(self, session: ServerSession) -> None:
        """Adds a server that joined; removes the session of its earlier epoch."""
        older = self.sessions.get(session.key.server_id)
        if older is not None:
            self.remove(older, "it joined again")
        self.departed.pop(session.key.server_id, None)
        self.sessions[session.key.server_id] = session
        self.epochs.join(session.key)
        session.changed = partial(self._note_serving, session)
        self._run.events.add(f"rollout server {session.name} joined")
        for listener in self.listeners:
            listener.joined(session)
        self._run.signal.notify()

    def remove(self, session: ServerSession, cause: str) -> None:
        """Ends a server's stream and removes the server; the episodes that it ran are lost."""
        session.outbox.close()
        if self.find(session.key) is not session:
            return
        del self.sessions[session.key.server_id]
        has_left = session.drained.is_set()
        session.become(LEFT if has_left else DEAD)
        if not has_left:
            self.num_lost += 1
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
            self._run.events.warn(f"rollout server {session.name} is gone: {cause}")
        for listener in self.listeners:
            listener.lost(session)
        self.epochs.depart(session.key)
        self._run.signal.notify()

    def drains(self, session: ServerSession, reason: str) -> None:
        """Notes that a server drains: it gets no new work and leaves after its episodes."""
        if session.is_leaving:
            return
        session.become(DRAINING)
        session.cause = reason
        self._tell(f"rollout server {session.name} drains: {reason}")
        warning = self.warn_without(session)
        if warning:
            self._run.events.warn(warning)
        for listener in self.listeners:
            listener.drains(session)
        self._run.signal.notify()

    def warn_without(self, session: ServerSession) -> str:
        """Returns a warning if no server remains when `session` leaves, else ""."""
        stay = (not other.is_leaving for other in self.sessions.values())
        if self._progress.is_over or any(stay):
            return ""
        limit_s = self._run.config.controller.stall_timeout_s
        return (
            f"no rollout server stays when {session.name} has left: the run waits for another one "
            f"(slipstream rollout-server), and fails after {limit_s:g} s without "
            "(controller.stall_timeout_s)"
        )

    def order_drain(
        self,
        session: ServerSession,
        reason: str,
        *,
        finish: bool,
    ) -> None:
        """Tells a server to leave; with `finish` its running episodes may end first."""
        run_stopped = self._progress.may_go_on
        order = fleet_pb2.Drain(reason=reason, finish=finish, run_stopped=run_stopped)
        session.send(fleet_pb2.ControllerMessage(drain=order))
        self.drains(session, reason)

    def _note_serving(self, session: ServerSession) -> None:
        before = self._serving.pop(session.key, None)
        if before is not None:
            self.versions -= Counter([before])
        if session.is_serving and session.version is not None:
            self._serving[session.key] = session.version
            self.versions[session.version] += 1
        # The idle time counts only while a server serves: without one there is no progress.
        self._progress.note_serving(bool(self._serving))

    def served_s(self) -> dict[ServerKey, float]:
        """Returns the seconds for which each server has served."""
        now_s = self.clock.now_s()
        return {session.key: session.served.total_s(now_s) for session in self.sessions.values()}

    def _tell(self, text: str) -> None:
        # At the end of a run all servers leave, and the end has its own event.
        if not self._progress.is_over:
            self._run.events.add(text)

    def _tell_refused(self, session: ServerSession) -> None:
        """Tells of refused calls of agents: of the first, and each time they are ten times more."""
        num_refused = session.report.refused_agents
        if num_refused < 10 * session.told_refused or not num_refused:
            return
        session.told_refused = num_refused
        calls = "1 call" if num_refused == 1 else f"{num_refused} calls"
        self._run.events.warn(
            f"rollout server {session.name} has refused {calls} of agents at agents.listen, which "
            "named no open episode: its log says where they came from"
        )

    def receive(self, session: ServerSession, message: fleet_pb2.ServerMessage) -> None:
        """Passes a message of a server to the listeners, of which some handle it."""
        session.last_seen_s = session.clock.now_s()
        kind = message.WhichOneof("message")
        if kind == "draining":
            self.drains(session, message.draining.reason)
        for listener in self.listeners:
            match kind:
                case "heartbeat" | "drained":
                    listener.reported(session, getattr(message, kind))
                case "environment":
                    listener.environment_reported(session, message.environment)
                case "publish":
                    listener.publish_reported(session, message.publish)
                case "lease":
                    listener.lease_reported(session, message.lease)
                case "rested":
                    listener.rested(session, message.rested)
        if kind in ("heartbeat", "drained"):
            session.report = getattr(message, kind)
            self._tell_refused(session)
        if kind == "drained":
            session.drained.set()
