"""Converts values that an environment returns to messages, and messages to its arguments.

An error names the value that cannot be sent. environment.proto states the bounds of messages.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import SupportsFloat, TypeVar

from slipstream.client.environment import (
    BRANCH_NAME,
    AgentOutcome,
    Reply,
    ResetResult,
    StepResult,
    ToolCall,
)
from slipstream.client.environment_loader import environment_failed
from slipstream.client.messages import read_message, show
from slipstream.core.errors import ProtocolError
from slipstream.core.machine.files import read_regular
from slipstream.core.models.vision import data_of_url
from slipstream.core.template_values import tools_json
from slipstream.protocol.bounds import check_bounds
from slipstream.v1 import environment_pb2 as pb

# The bounds of `ChatMessage.parts` and `ContentPart.image` in environment.proto.
MAX_PARTS = 256
MAX_IMAGE_BYTES = 16 << 20
# The bound of `Observation.expected_answer`.
MAX_ANSWER_BYTES = 4096
_FORMS = (
    '{"type": "text", "text": ...}, {"type": "image_url", "image_url": {"url": "data:..."}}, '
    '{"type": "image", "path": ...} or {"type": "image", "data": ...}'
)
_FIELDS = {
    "text": {"type", "text"},
    "image_url": {"type", "image_url", "url"},
    "image": {"type", "path", "data"},
}
Made = TypeVar("Made", pb.Observation, pb.Verdict, pb.AgentResult)


def _reply_limit(limit: object) -> int:
    if limit is None:
        return 0
    if isinstance(limit, int) and limit >= 1:
        return limit
    raise environment_failed(f"max_reply_tokens must be None or at least 1, got {show(limit)}")


def check_replies(right: object, wrong: object) -> None:
    """Raises EnvironmentFailed unless the replies that `slipstream check` plays are texts."""
    _text(right, "right_reply")
    for each in wrong if isinstance(wrong, list | tuple) else [wrong]:
        _text(each, "wrong_reply")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise environment_failed(f"{name} must be a text, got {show(value)}")
    return value


def _expected(answer: object) -> str:
    answer = _text(answer, "expected_answer")
    return answer.encode(errors="replace")[:MAX_ANSWER_BYTES].decode(errors="ignore")


def observation(opening: object, reply_limit: object, expected: object = "") -> pb.Observation:
    """Converts the result of `reset` and two attributes of the environment to a message.

    These are its `max_reply_tokens` and its `expected_answer`.
    Raises EnvironmentFailed, which names the first value that cannot be sent.
    """
    opened = opening if isinstance(opening, ResetResult) else None
    made = pb.Observation(
        messages=_messages(opening if opened is None else opened.messages, "reset()"),
        max_reply_tokens=_reply_limit(reply_limit),
        tools_json=_tools(opened.tools) if opened is not None and opened.tools else "",
        given_reply=_given(opened.reply, "reset()") if opened is not None else "",
        expected_answer=_expected(expected),
    )
    return _bounded(made)


def reply_of(command: pb.StepCommand) -> Reply:
    """Returns the reply to pass to the environment's `step`."""
    tokens = command.token_ids
    if not command.HasField("parsed"):
        return Reply(command.reply, token_ids=tokens)
    parsed = command.parsed
    calls = [ToolCall(call.id, call.name, _arguments(call.arguments)) for call in parsed.tool_calls]
    return Reply(
        command.reply,
        content=parsed.content,
        reasoning=parsed.reasoning,
        tool_calls=calls,
        token_ids=tokens,
    )


def _arguments(text: str) -> Mapping[str, object] | str:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def verdict(result: object, *, gives: bool) -> pb.Verdict:
    """Converts the result of `step`; raises EnvironmentFailed if it is invalid or out of bounds.

    `gives` says that the environment gives the replies.
    """
    if not isinstance(result, StepResult):
        raise environment_failed(f"step() must return a StepResult, got {show(result)}")
    if result.done not in (True, False):
        raise environment_failed(f"done must be True or False, got {show(result.done)}")
    if not result.done and not result.messages:
        raise environment_failed("step() must give messages when the episode is not done")
    if result.done and result.messages and not gives:
        raise environment_failed("step() gives messages that nobody will read: done is True")
    if result.done and result.tools is not None:
        raise environment_failed("step() names tools that nobody will call: done is True")
    if result.done and result.reply is not None:
        raise environment_failed("step() gives a reply that nobody will read: done is True")
    made = pb.Verdict(
        reward=_finite(result.reward, "the reward"),
        done=bool(result.done),
        messages=_messages(result.messages, "step()") if result.messages else [],
        metrics=_metrics(result.metrics),
        tools_json="" if result.tools is None else _tools(result.tools),
        given_reply=_given(result.reply, "step()"),
        token_rewards=_by_token(result.token_rewards, "token_rewards"),
    )
    return _bounded(made)


def agent_observation(reply_limit: object) -> pb.Observation:
    """Returns the observation of an agent, which contains only the limit of reply tokens.

    Raises EnvironmentFailed if the limit is neither None nor at least 1.
    """
    return _bounded(pb.Observation(is_agent=True, max_reply_tokens=_reply_limit(reply_limit)))


def agent_result(result: object) -> pb.AgentResult:
    """Converts the result of `run`; raises EnvironmentFailed if it is invalid or out of bounds."""
    if not isinstance(result, AgentOutcome):
        if not isinstance(result, SupportsFloat):
            what = "run() must return a number or an AgentOutcome"
            raise environment_failed(f"{what}, got {show(result)}")
        result = AgentOutcome(_finite(result, "the reward"))
    made = pb.AgentResult(
        reward=_finite(result.reward, "the reward"),
        metrics=_metrics(result.metrics),
        shares=_by_branch(result.shares, "shares", "share"),
        rewards=_by_branch(result.rewards, "rewards", "reward"),
        reply_rewards=_by_reply(result.reply_rewards),
    )
    return _bounded(made)


def _bounded(made: Made) -> Made:
    try:
        check_bounds(made)
    except ProtocolError as error:
        raise environment_failed(str(error)) from None
    return made


def _metrics(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise environment_failed(f"metrics must map names to numbers, got {show(metrics)}")
    return {str(name): _finite(value, f"the metric {name!r}") for name, value in metrics.items()}


def _by_branch(numbers: object, several: str, one: str) -> dict[str, float]:
    if not isinstance(numbers, Mapping):
        raise environment_failed(f"{several} must map branches to numbers, got {show(numbers)}")
    for name in numbers:
        if not isinstance(name, str) or BRANCH_NAME.fullmatch(name) is None:
            what = f"{several} are of branches, with names of 1 to 64 letters, digits and ._:+-"
            raise environment_failed(f"{what}, got {show(name)}")
    return {name: _finite(value, f"the {one} of {name!r}") for name, value in numbers.items()}


def _by_reply(rewards: object) -> list[pb.ReplyReward]:
    if not isinstance(rewards, Mapping) or not all(isinstance(name, str) for name in rewards):
        what = "reply_rewards must map ids of answers to rewards"
        raise environment_failed(f"{what}, got {show(rewards)}")
    found = []
    for name, value in rewards.items():
        what = f"the reward of reply {show(name)}"
        numbers = _listed(value)
        if numbers is None:
            found.append(pb.ReplyReward(reply_id=name, reward=_finite(value, what)))
        else:
            found.append(pb.ReplyReward(reply_id=name, token_rewards=_by_token(numbers, what)))
    return found


def _listed(value: object) -> list[object] | None:
    """Returns the elements of a list, an array or a tensor; None for a number or a text."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        return None
    try:
        return [*value]
    except TypeError:
        # An array without a dimension.
        return None


def _by_token(rewards: object, what: str) -> list[float]:
    numbers = _listed(rewards)
    if numbers is None:
        raise environment_failed(f"{what} must be a list of numbers, got {show(rewards)}")
    return [_finite(value, f"number {place} of {what}") for place, value in enumerate(numbers, 1)]


def _finite(value: object, what: str) -> float:
    if isinstance(value, SupportsFloat):
        try:
            number = float(value)
        except (ValueError, OverflowError, TypeError, RuntimeError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise environment_failed(f"{what} must be a finite number, got {show(value)}")


def _messages(messages: object, source: str) -> list[pb.ChatMessage]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise environment_failed(f"{source} must give a list of messages, got {show(messages)}")
    return [_message(message, source) for message in messages]


def _message(given: object, source: str) -> pb.ChatMessage:
    try:
        message = read_message(given)
        is_text = isinstance(message.content, str)
        return pb.ChatMessage(
            role=message.role,
            content=message.content if isinstance(message.content, str) else "",
            tool_call_id=message.tool_call_id,
            parts=[] if is_text else content_parts(message.content),
            name=message.name,
            tool_calls=[
                pb.ToolCall(id=call.id, name=call.name, arguments=call.text)
                for call in message.tool_calls
            ],
            reasoning=message.reasoning,
        )
    except ValueError as error:
        raise environment_failed(f"a message of {source}: {error}") from None


def _tools(tools: object) -> str:
    try:
        return tools_json(tools)
    except ValueError as error:
        raise environment_failed(str(error)) from None


def _given(reply: object, source: str) -> str:
    if reply is None:
        return ""
    if isinstance(reply, str) and reply:
        return reply
    raise environment_failed(
        f"the reply of {source} must be None or a text that is not empty, got {show(reply)}"
    )


def content_parts(content: object) -> list[pb.ContentPart]:
    """Converts a list of text and image parts; raises ValueError if the list or a part is invalid.

    An image file is read here, so that the message holds its bytes.
    """
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise ValueError(f"content must be a text or a list of parts, got {show(content)}")
    if len(content) > MAX_PARTS:
        raise ValueError(f"content must have at most {MAX_PARTS} parts, got {len(content)}")
    return [_part(part) for part in content]


def _part(part: object) -> pb.ContentPart:
    if not isinstance(part, Mapping):
        raise ValueError(f"a part must be {_FORMS}, got {show(part)}")
    kind, url = part.get("type"), part.get("image_url")
    fields = part.items() if not isinstance(url, Mapping) else [*part.items(), *url.items()]
    given = {name for name, value in fields if value is not None}
    if unread := given - _FIELDS.get(str(kind), given):
        raise ValueError(f"a part of type {kind!r} has no field {min(unread)!r}, got {show(part)}")
    if kind == "text" and isinstance(part.get("text"), str):
        return pb.ContentPart(text=part["text"])
    if kind == "image_url" and isinstance(url, Mapping) and isinstance(url.get("url"), str):
        return pb.ContentPart(image=data_of_url(url["url"]))
    if kind == "image" and isinstance(part.get("data"), bytes):
        return pb.ContentPart(image=part["data"])
    if kind == "image" and isinstance(part.get("path"), str | Path):
        try:
            data = read_regular(Path(part["path"]), most_bytes=MAX_IMAGE_BYTES)
            return pb.ContentPart(image=data)
        except OSError as error:
            raise ValueError(f"an image cannot be read: {error}") from error
    raise ValueError(f"a part must be {_FORMS}, got {show(part)}")
