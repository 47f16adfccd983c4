"""The conversations of one episode: a tree of messages, and a token sequence for each branch.

A request continues a conversation if it repeats the conversation with at least one more message.
The conversation's tokens stay as they were sampled; only the new messages are tokenized. The
messages of a request are compared with recorded messages by `MessageKey`.

Life of a call: `find` -> `begin` -> the engine samples -> `finish`, then `remember` with the reply
as the client saw it. A call that samples nothing leaves no trace.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.models.images import PlacedImage
from slipstream.core.types import LogprobArray, VersionSpan
from slipstream.rollout_server.engine_interface import Generation

ASSISTANT = "assistant"


@dataclass(eq=False, kw_only=True)
class TokenRecord:
    """Tokens in which context and replies alternate, as in a trajectory."""

    token_ids: list[int] = field(default_factory=list)
    run_lengths: list[int] = field(default_factory=list)
    # `Generation.sampled_arrays` of each reply.
    sampled: list[dict[str, LogprobArray]] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    # Experts of consecutive tokens, from the first token on.
    expert_ids: list[npt.NDArray[np.unsignedinteger]] = field(default_factory=list)
    # For each reply, the tokens that its tokens were drawn from.
    kept_tokens: list[KeptTokens] = field(default_factory=list)

    @property
    def num_routed(self) -> int:
        return sum(map(len, self.expert_ids))

    def add_tokens(self, token_ids: list[int]) -> None:
        """Appends a run of tokens: the context of a reply, or the reply itself."""
        self.token_ids += token_ids
        self.run_lengths.append(len(token_ids))

    def add_generation(self, generation: Generation) -> None:
        """Appends a reply exactly as it was sampled."""
        self.add_tokens(generation.token_ids.tolist())
        self.sampled.append(generation.sampled_arrays)
        self.spans += generation.version_spans
        kept_tokens = generation.kept_tokens
        if kept_tokens is None:
            kept_tokens = KeptTokens.of_all(len(generation.token_ids))
        self.kept_tokens.append(kept_tokens)
        if generation.expert_ids is not None:
            self.expert_ids.append(generation.expert_ids)

    def earn(self, reply: int, reward: float, token_rewards: Sequence[float] = ()) -> None:
        """Adds a reward to the last token of reply number `reply`, and one to each of its tokens.

        Raises ValueError if `token_rewards` is neither empty nor as long as the reply.
        """
        arrays = self.sampled[reply]
        size = len(arrays["behavior_logprobs"])
        earned = arrays.setdefault("token_rewards", np.zeros(size, dtype=np.float32))
        if len(token_rewards):
            if len(token_rewards) != size:
                raise ValueError(
                    f"token_rewards needs a number for each token of its reply: {size}, "
                    f"got {len(token_rewards)}"
                )
            earned += np.asarray(token_rewards, dtype=np.float32)
        with np.errstate(over="ignore"):
            # The codec refuses what is infinite.
            earned[-1:] += np.float32(reward)


@dataclass(eq=False)
class ConversationBranch(TokenRecord):
    """The tokens of one sequence of messages."""

    name: str
    images: list[PlacedImage] = field(default_factory=list)
    # Whether an open call continues the branch at its end.
    is_taken: bool = False


@dataclass(frozen=True, eq=False)
class AgentTurn:
    """A finished reply; `end` is the number of tokens in `branch` up to the end of the reply."""

    branch: ConversationBranch
    end: int

    @property
    def reply(self) -> int:
        return [*itertools.accumulate(self.branch.run_lengths)].index(self.end) // 2


@dataclass(eq=False)
class AgentCall:
    """An open call: the prompt for the engine, and the branch that will record the tokens."""

    branch: ConversationBranch
    # The tokens that the model reads; the last of them are the call's own.
    prompt: list[int]
    context: list[int]
    is_append: bool
    # The images of the prompt.
    images: list[PlacedImage] = field(default_factory=list)
    is_over: bool = False


@dataclass(eq=False)
class _Node:
    """One message in the tree of conversations.

    `turns` has the turns whose conversation, reply included, consists of the messages from the root
    to this one.
    """

    children: dict[MessageKey, _Node] = field(default_factory=dict)
    turns: list[AgentTurn] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """A turn that a request continues, and the number of request messages that the turn covers."""

    turn: AgentTurn
    num_messages: int


class Conversations:
    """All branches of one episode."""

    def __init__(self) -> None:
        self.branches: list[ConversationBranch] = []
        self._roots: dict[str, _Node] = {}

    def find(
        self,
        settings: str,
        messages: Sequence[MessageKey],
        name: str,
        *,
        previous: AgentTurn | None = None,
    ) -> Found | None:
        """Returns the last turn of the longest conversation that `messages` continue, or None.

        `settings` is the text of the template values of the call; only conversations with the same
        text count. The turn `previous` is preferred if `messages` continue it. Among turns with
        equal messages, a turn that a call in a branch called `name` can extend is preferred.
        """
        node = self._roots.get(settings)
        longest = None
        for num_messages, key in enumerate(messages[:-1], start=1):
            node = node.children.get(key) if node is not None else None
            if node is None:
                break
            if previous in node.turns:
                return Found(previous, num_messages)
            if node.turns:
                free = (turn for turn in node.turns if _can_append(turn, name))
                longest = Found(next(free, node.turns[0]), num_messages)
        return longest

    def begin(
        self,
        name: str,
        turn: AgentTurn | None,
        context: list[int],
        images: Sequence[PlacedImage] = (),
    ) -> AgentCall:
        """Opens a call, whose prompt is the conversation up to the end of `turn`, then `context`.

        If `turn` is None, the prompt is only `context`. The call extends the branch of `turn` if
        that branch ends with `turn`, has no open call and is called `name`; else it begins a
        branch. The offsets of `images` count from the start of `context`.
        """
        start = 0 if turn is None else turn.end
        earlier_images = [] if turn is None else [i for i in turn.branch.images if i.offset < start]
        seen = earlier_images + [image.moved(start) for image in images]
        if turn is not None and _can_append(turn, name):
            turn.branch.is_taken = True
            prompt = turn.branch.token_ids + context
            return AgentCall(turn.branch, prompt, context, is_append=True, images=seen)
        if turn is not None:
            context = turn.branch.token_ids[: turn.end] + context
        return AgentCall(ConversationBranch(name), context, context, is_append=False, images=seen)

    def finish(self, call: AgentCall, generation: Generation | None) -> AgentTurn | None:
        """Ends a call, and adds its prompt and reply to the branch; returns the reply's turn.

        Returns None, and adds nothing, if no token was sampled.
        """
        assert not call.is_over, "a call ends once"
        call.is_over = True
        branch = call.branch
        if call.is_append:
            branch.is_taken = False
        if generation is None or not len(generation.token_ids):
            return None
        if not call.is_append:
            self.branches.append(branch)
        branch.images = call.images
        branch.add_tokens(call.context)
        branch.add_generation(generation)
        return AgentTurn(branch, len(branch.token_ids))

    def remember(
        self,
        turn: AgentTurn,
        settings: str,
        messages: Sequence[MessageKey],
        reply: Sequence[MessageKey],
    ) -> None:
        """Adds a finished turn to the tree, below `messages` and its own reply.

        `reply` has the possible keys of the reply; any of them leads to the turn.
        """
        node = self._roots.setdefault(settings, _Node())
        for key in messages:
            node = node.children.setdefault(key, _Node())
        for key in reply:
            node.children.setdefault(key, _Node()).turns.append(turn)


def _can_append(turn: AgentTurn, name: str) -> bool:
    branch = turn.branch
    return not branch.is_taken and branch.name == name and turn.end == len(branch.token_ids)


class MessageKey(NamedTuple):
    """A message in normalised form, equal for all notations of the same message.

    Text in one part equals plain text, no text equals empty text, and the arguments of a tool call
    are compared as JSON. A part of a reply that is only white space is ignored, since clients drop
    it. So is the name that a client gives the author of a reply. `reasoning` is None if the message
    has none.
    """

    role: str
    text: str | tuple[str, ...]
    tool_calls: tuple[tuple[str, str, str], ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str | None = None


def message_key(message: Mapping[str, Any]) -> MessageKey:
    """Returns the key by which `message`, in OpenAI's chat completions format, is compared."""
    role = str(message.get("role", ""))
    content = message.get("content")
    parts = tuple(map(_part, [content] if isinstance(content, str) else content or ()))
    author = str(message.get("name") or "")
    if role == ASSISTANT:
        parts = tuple(part for part in parts if part.strip())
        author = ""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        name = str(function.get("name") or "")
        calls.append((str(call.get("id") or ""), name, _arguments(function.get("arguments"))))
    return MessageKey(
        role=role,
        text=parts[0] if len(parts) == 1 else parts or "",
        tool_calls=tuple(calls),
        tool_call_id=str(message.get("tool_call_id") or ""),
        name=author,
        reasoning=message.get("reasoning") or message.get("reasoning_content") or None,
    )


def reply_keys(message: Mapping[str, Any]) -> tuple[MessageKey, ...]:
    """Returns the keys that a reply may have when a client sends it back.

    These are the key of the message and, if it has reasoning, the key without the reasoning.
    """
    key = message_key(message)
    return (key, key._replace(reasoning=None)) if key.reasoning else (key,)


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    # The zero character keeps a picture apart from a text that spells it.
    return "\0" + json.dumps(part, sort_keys=True, default=str)


def _arguments(arguments: object) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return "\0" + str(arguments)
    return json.dumps(arguments if arguments is not None else {}, sort_keys=True)
