"""One connected rollout server: its states, and the orders that wait to be written on its stream.

    JOINING --> LOADING --> SERVING --> LOADING ...
    any of them --> STALE --> LOADING
    any of them --> DRAINING --> LEFT
    all of them --> DEAD

A server loads when it was told to receive new weights, and serves when it has loaded them whole and
a probe, if asked for, has passed. A publish that fails in any phase makes it stale. It drains when
it leaves, on its own or by an order, and has left once it has reported its last counters. It is
dead if its stream ends or is silent for too long before that.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import grpc.aio
from slipstream.core.types import PolicyVersion, ServerId, TrajectoryId
from slipstream.learner.controller.run import LoopClock, Stopwatch
from slipstream.v1 import fleet_pb2, status_pb2

JOINING = fleet_pb2.SERVER_STATE_JOINING
LOADING = fleet_pb2.SERVER_STATE_LOADING
SERVING = fleet_pb2.SERVER_STATE_SERVING
STALE = fleet_pb2.SERVER_STATE_STALE
DRAINING = fleet_pb2.SERVER_STATE_DRAINING
DEAD = fleet_pb2.SERVER_STATE_DEAD
LEFT = fleet_pb2.SERVER_STATE_LEFT


# The states from which a server comes to load weights, and to serve them; all others lead on from
# any state.
_BEFORE = {LOADING: (JOINING, SERVING, STALE), SERVING: (LOADING,)}


def next_state(
    state: fleet_pb2.ServerState, target: fleet_pb2.ServerState
) -> fleet_pb2.ServerState:
    """Returns the state of a server that comes to `target`; raises ValueError if it cannot.

    Nothing leads out of DEAD and LEFT. A DRAINING server may finish a publish in which it takes
    part, because otherwise the other receivers would lose that publish. It stays DRAINING.
    """
    if state in (DEAD, LEFT) or (state == DRAINING and target not in (DEAD, LEFT)):
        return state
    if state not in _BEFORE.get(target, (state,)):
        name = fleet_pb2.ServerState.Name
        raise ValueError(f"a rollout server in the state {name(state)} cannot be {name(target)}")
    return target


class ServerKey(NamedTuple):
    """One epoch of one rollout server; a tuple, as it is hashed dozens of times per trajectory."""

    server_id: ServerId
    epoch: int


Message = TypeVar("Message")
# The context of one gRPC call to the controller.
CallContext: TypeAlias = grpc.aio.ServicerContext[Any, Any]

MAX_MESSAGES = 10_000
PUBLISH_ORDERS = ("prepare", "receive", "commit", "abort", "probe_verdict", "rest", "wake")


@dataclass(frozen=True)
class _WaitingMessage(Generic[Message]):
    message: Message
    after: asyncio.Future[None] | None
    overtakes: bool

    @property
    def is_held(self) -> bool:
        return self.after is not None and not self.after.done()


class Outbox(Generic[Message]):
    """The queue of messages that wait to be written on one stream; it has one reader."""

    def __init__(self) -> None:
        self._messages: deque[_WaitingMessage[Message]] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def put(
        self,
        message: Message,
        *,
        after: asyncio.Future[None] | None = None,
        overtakes: bool = False,
    ) -> bool:
        """Adds a message; returns False if the outbox is closed or has `MAX_MESSAGES`.

        The message waits until `after` is done, and later messages wait with it. A message that
        `overtakes` does not wait for earlier messages.
        """
        if self._closed or len(self._messages) >= MAX_MESSAGES:
            return False
        self._messages.append(_WaitingMessage(message, after, overtakes))
        self._changed.set()
        if after is not None:
            after.add_done_callback(lambda _: self._changed.set())
        return True

    def close(self) -> None:
        """Ends the reader's loop once it has taken the messages that are already in the outbox."""
        self._closed = True
        self._changed.set()

    def pop(self) -> Message | None:
        """Removes and returns the next message that may be sent, or returns None if there is none.

        Raises the error of the future for which the message waits (`after` of `put`), if that
        failed.
        """
        is_held = False
        for place, waiting in enumerate(self._messages):
            is_held = is_held or waiting.is_held
            if not is_held or (waiting.overtakes and not waiting.is_held):
                del self._messages[place]
                if waiting.after is not None:
                    waiting.after.result()
                return waiting.message
        return None

    async def messages(
        self, reading: Coroutine[Any, Any, None] | None = None
    ) -> AsyncGenerator[Message, None]:
        """Yields messages in the order of `pop`, until the outbox is closed and empty.

        Raises the error of the future for which a message waits (`after` of `put`), if that fails.
        A task carries out `reading`, which takes the other side's messages, and whose end closes
        the outbox. At the end its error, if any, is raised, so that the call fails and logs it.
        """
        reader = None if reading is None else asyncio.create_task(reading)
        if reader is not None:
            reader.add_done_callback(lambda _: self.close())
        try:
            while not self._closed or self._messages:
                if (message := self.pop()) is not None:
                    yield message
                else:
                    await self._changed.wait()
                    self._changed.clear()
            if reader is not None and reader.done() and not reader.cancelled():
                reader.result()
        finally:
            if reader is not None:
                reader.cancel()


@dataclass(frozen=True)
class JoinedOrder:
    """An order to one server: its own part, and an encoded part shared with other servers.

    Protobuf parses two concatenated encodings as one message. A layout has thousands of tensors, so
    it is encoded once, and the queues of all servers hold the same bytes.
    """

    own: fleet_pb2.ControllerMessage
    shared: bytes

    def encoded(self) -> bytes:
        """Returns the whole order, encoded."""
        return self.own.SerializeToString() + self.shared


@dataclass(eq=False)
class ServerSession:
    """One connected rollout server."""

    key: ServerKey
    hello: fleet_pb2.ServerHello
    # The trajectories, of any server, that lay in the queue when the stream began.
    in_queue: Sequence[TrajectoryId] = ()
    state: fleet_pb2.ServerState = JOINING
    # The version that the server serves, or served last.
    version: PolicyVersion | None = None
    # The publish that delivered `version`.
    publish_id: str = ""
    cause: str = ""
    report: fleet_pb2.ServerReport = field(default_factory=fleet_pb2.ServerReport)
    # Time at which the server joined, by `time.monotonic`.
    began_s: float = field(default_factory=lambda: time.monotonic())
    # The clock that measures the server's silence.
    clock: LoopClock = field(default_factory=LoopClock)
    # Time at which the server stopped serving last, or joined, by `time.monotonic`.
    unserved_since_s: float = field(default_factory=lambda: time.monotonic())
    joined_s: float = field(init=False)
    last_seen_s: float = field(init=False)
    outbox: Outbox[fleet_pb2.ControllerMessage | JoinedOrder] = field(default_factory=Outbox)
    # Earliest time of the next publish to this server, by `time.monotonic`.
    retry_publish_s: float = 0.0
    failed_publishes: int = 0
    # The process of its name that was turned away last; one event names it.
    turned_away: int = 0
    # Refused calls of agents, as the last event had them.
    told_refused: int = 0
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    # Measures the time in which the server serves.
    served: Stopwatch = field(default_factory=Stopwatch)
    # Called after every change of the state.
    changed: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.joined_s = self.last_seen_s = self.clock.now_s()

    @property
    def name(self) -> str:
        return self.key.server_id

    @property
    def silent_s(self) -> float:
        """Seconds since the server's last message, leaving out stalls of the event loop."""
        return self.clock.now_s() - self.last_seen_s

    @property
    def is_serving(self) -> bool:
        return self.state == SERVING

    @property
    def is_leaving(self) -> bool:
        """Whether the server drains, has left or is lost, so that it gets no new work."""
        return self.state in (DRAINING, DEAD, LEFT)

    def become(self, target: fleet_pb2.ServerState) -> None:
        """Moves the server to the state `target`, unless it stays; see `next_state`."""
        if self.is_serving:
            self.unserved_since_s = time.monotonic()
        self.state = next_state(self.state, target)
        self.served.note(self.clock.now_s(), running=self.is_serving)
        self.changed()

    def send(
        self,
        message: fleet_pb2.ControllerMessage | JoinedOrder,
        after: asyncio.Future[None] | None = None,
    ) -> None:
        """Puts an order on the server's stream; ends the stream of a server that does not read.

        The order is sent when `after` is done, and later orders wait with it. Orders of a publish
        do not wait for earlier orders, as the trainer and the other servers would also wait.
        """
        own_message = message.own if isinstance(message, JoinedOrder) else message
        overtakes = own_message.WhichOneof("message") in PUBLISH_ORDERS
        if not self.outbox.put(message, after=after, overtakes=overtakes):
            self.outbox.close()


def describe(session: ServerSession) -> status_pb2.ServerStatus:
    """Returns a session in the form in which the status call shows it."""
    status = status_pb2.ServerStatus(
        server_id=session.key.server_id,
        server_epoch=session.key.epoch,
        state=fleet_pb2.ServerState.Name(session.state),
        report=session.report,
        cause=session.cause,
        silent_s=session.silent_s,
        disabled_features=session.hello.disabled_features,
    )
    if session.version is not None:
        status.version.incarnation, status.version.step = session.version
    return status
