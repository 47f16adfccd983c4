"""One HTTP request of an agent while it is served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.rollout_server.agents.conversations import Call, Found, Turn
from slipstream.rollout_server.agents.limits import Refusal, Room
from slipstream.rollout_server.agents.messages import MessageKey


@dataclass(frozen=True)
class HttpCall:
    """A request of an agent: `number` counts in its episode, `branch` is the endpoint's name."""

    number: int
    method: str
    path: str
    body: bytes
    branch: str = ""


@dataclass(frozen=True)
class HttpPart:
    """A part of the answer; only the first part has `status` and `headers`."""

    body: bytes
    is_last: bool
    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(eq=False)
class OpenCall:
    """The state of a call that asks for a reply.

    begun: `call` and `room` are set -> sampled: `turn` is set -> answered. A call without a turn
    has sampled nothing.
    """

    http: HttpCall
    request_id: str
    path: str
    is_stream: bool
    # Whether the reply may call tools.
    has_tools: bool = False
    settings: str = ""
    keys: Sequence[MessageKey] = ()
    # The turn that its messages continue, if any.
    found: Found | None = None
    # The turn that the request names as the previous one; None: it names none.
    previous: Turn | None = None
    # The input of a request whose response is stored; None: it is not.
    stored_items: list[Any] | None = None
    call: Call | None = None
    room: Room | None = None
    # Samples the reply, also when the client has stopped to read.
    sampling: asyncio.Task[None] | None = None
    turn: Turn | None = None
    refusal: Refusal | None = None
    # What the client was sent; it is read when a later call may continue this one.
    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    # Whether `body` has its last part; the whole of a stream is told by its events.
    is_whole: bool = False
    is_answered: bool = False
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
