"""One HTTP request of an agent while it is served, and the limits of its episode."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.rollout_server.agents.conversations import AgentCall, AgentTurn, Found, MessageKey
from slipstream.rollout_server.engine_interface import Sampling


class Refusal(Exception):
    """The error answer to a call, raised or returned.

    `code` and `param` are the fields of the same names in an error of OpenAI's API.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.param, self.status = message, code, param, status


@dataclass(frozen=True)
class ReplyRoom:
    """The token budget of a call.

    `new_tokens` limits the tokens of the call's reply. `reserved_tokens` is the sum of `new_tokens`
    and the call's new context; it counts against the episode's limit until the call ends.
    """

    new_tokens: int
    reserved_tokens: int


@dataclass(frozen=True)
class Use:
    """The tokens, turns and branches that an episode has used or that open calls may use."""

    tokens: int = 0
    reserved_tokens: int = 0
    turns: int = 0
    branches: int = 0


# Means that the call must wait, since an open call may leave room for it.
WAIT = None


def room(
    sampling: Sampling, use: Use, *, prompt: int, context: int, is_new: bool
) -> ReplyRoom | Refusal | None:
    """Returns a call's token budget, or a Refusal if the episode's limits rule the call out.

    Returns WAIT while open calls reserve tokens that this call needs. `prompt` is the number of
    tokens of the whole prompt. `context` is the number of tokens that the call adds, which `use`
    does not count yet. `is_new` says that the call begins a branch.
    """
    if use.turns >= sampling.max_turns:
        limit = f"sampling.max_turns = {sampling.max_turns}"
        return Refusal(f"the episode has reached {limit}", code="max_turns_exceeded")
    if is_new and use.branches >= sampling.max_branches:
        limit = f"sampling.max_branches = {sampling.max_branches}"
        return Refusal(f"the episode has reached {limit}", code="max_branches_exceeded")
    in_branch = sampling.max_episode_tokens - prompt
    if in_branch < 1:
        return _too_long(prompt, "sampling.max_episode_tokens", sampling.max_episode_tokens)
    total = sampling.max_total_tokens or sampling.max_episode_tokens
    ever = total - use.tokens - context
    if ever < 1:
        name = "max_total_tokens" if sampling.max_total_tokens else "max_episode_tokens"
        return _too_long(use.tokens + context, f"sampling.{name}", total)
    most = min(in_branch, sampling.max_reply_tokens)
    new_tokens = min(most, ever - use.reserved_tokens)
    # A reply is not cut short because of calls that may need less than they reserve.
    if use.reserved_tokens and new_tokens < most:
        return WAIT
    return ReplyRoom(new_tokens, context + new_tokens)


def _too_long(num_tokens: int, name: str, limit: int) -> Refusal:
    what = f"{num_tokens} tokens leave no room for a reply within {name} = {limit}"
    return Refusal(f"prompt is too long: {what}", code="context_length_exceeded")


@dataclass(frozen=True)
class HttpCall:
    """An HTTP request of an agent.

    `number` ascends within an episode. `branch` is the branch name of the endpoint that the agent
    used, or "" if it has none.
    """

    number: int
    method: str
    path: str
    body: bytes
    branch: str = ""


@dataclass(frozen=True)
class HttpPart:
    """A part of the answer to an `HttpCall`; only the first part has `status` and `headers`."""

    body: bytes
    is_last: bool
    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(eq=False)
class ServedCall:
    """The state of a call that asks for a reply.

    `call` and `room` are set when the call begins, and `turn` when its reply has been sampled. If
    `turn` stays None, the call has sampled nothing.
    """

    http: HttpCall
    request_id: str
    path: str
    is_stream: bool
    # Whether the reply may call tools.
    has_tools: bool = False
    settings: str = ""
    keys: Sequence[MessageKey] = ()
    # The turn that the messages of the request continue, if any.
    found: Found | None = None
    # The turn that the request names as the previous one, or None.
    previous: AgentTurn | None = None
    # The input of a request whose response is stored, else None.
    stored_items: list[Any] | None = None
    call: AgentCall | None = None
    room: ReplyRoom | None = None
    # Samples the reply, even if the client has stopped reading.
    sampling: asyncio.Task[None] | None = None
    turn: AgentTurn | None = None
    refusal: Refusal | None = None
    # The answer that the client was sent; it is parsed when a later call may continue this call.
    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    # Whether `body` has its last part; the end of a stream is seen by its events.
    is_whole: bool = False
    is_answered: bool = False
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
