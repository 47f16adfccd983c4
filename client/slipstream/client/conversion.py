"""Converts values that an environment returns to messages, and messages to its arguments.

Chat messages are read as files, environments and chat formats write them. Every field is read or
refused: `FIELDS` says what becomes of each. An error names the value that cannot be sent.
environment.proto states the bounds of messages.
"""

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, SupportsFloat, TypeVar, cast

from slipstream.client.environment import (
    BRANCH_NAME,
    AgentOutcome,
    AnyEnvironment,
    FinishedEpisode,
    GroupReward,
    Message,
    Reply,
    ResetResult,
    StepResult,
    ToolCall,
)
from slipstream.client.environment_loader import environment_failed
from slipstream.core.arguments import Count, kind_of, of_kind
from slipstream.core.errors import ProtocolError, did_you_mean, near_names
from slipstream.core.machine.files import read_regular
from slipstream.core.models.images import data_of_url
from slipstream.core.template_values import json_object, plain, show, tools_json
from slipstream.protocol.bounds import check_bounds, decode
from slipstream.v1 import environment_pb2 as pb

# The field of `Message` to which each field of chat formats goes.
FIELDS = {field.name: field.name for field in fields(Message)}
FIELDS |= dict.fromkeys(("reasoning_content", "thinking"), "reasoning")
# Whether a reply is trained, as OpenAI's and other formats for demonstrations write it.
TRAINED = ("weight", "train", "training", "trainable")
# The roles in which a field has a meaning; any other field has it in every role.
_ROLES = {"tool_calls": "assistant", "reasoning": "assistant", "tool_call_id": "tool"}
# Roles by their names in small letters and in other formats; templates write any name as a role.
_ROLE_OF = {name: name for name in ("system", "developer", "user", "assistant", "tool")}
_ROLE_OF |= {"human": "user"} | dict.fromkeys(("gpt", "model", "bot", "ai"), "assistant")
# The fields of a call of a tool and of its function; `index` says no more than its place.
_CALL = ("id", "type", "function", "name", "arguments", "index")


def read_message(given: object) -> Message:
    """Returns the message that `given` is: a Message, or a mapping with the fields of `FIELDS`.

    Fields without a value do not count: parquet writes them where another row has one. Raises
    ValueError, which names the first field that is unknown or unusable.
    """
    if isinstance(given, Message):
        given = {field.name: getattr(given, field.name) for field in fields(Message)}
    if not isinstance(given, Mapping) or not {"role", "content"} <= given.keys():
        raise ValueError(f"a message has role and content, got {show(given)}")
    message_fields: dict[str, Any] = {"role": given["role"], "content": given["content"]}
    for name, value in given.items():
        if name in message_fields or _is_absent(value):
            continue
        if name in TRAINED:
            raise ValueError(f"the field {name!r} says what is trained, which demonstrations read")
        if name not in FIELDS:
            near = near_names(str(name), FIELDS)
            hint = did_you_mean(near) if near else f"it has {', '.join(FIELDS)}"
            raise ValueError(f"a message has no field {name!r}; {hint}")
        first = message_fields.setdefault(FIELDS[name], value)
        if first is not value and first != value:
            raise ValueError(f"a message has {FIELDS[name]} by two names with different values")
    _check(message_fields)
    calls = message_fields.get("tool_calls")
    if calls is not None:
        message_fields["tool_calls"] = _tool_calls(calls)
        message_fields["content"] = message_fields["content"] or ""
    content = message_fields["content"]
    is_list = isinstance(content, Sequence) and not isinstance(content, bytes) and len(content) > 0
    if not (is_list or isinstance(content, str)):
        raise ValueError(f"content must be a text or a list of parts, got {show(content)}")
    return Message(**message_fields)


def _tool_calls(calls: object) -> tuple[ToolCall, ...]:
    """Returns a message's calls of tools; `calls` is their list, or JSON text of it."""
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tool_calls must be a list, or JSON text of one: {error}") from None
    if not isinstance(calls, list | tuple):
        raise ValueError(f"tool_calls must be a list, got {show(calls)}")
    return tuple(map(_call, calls))


def _is_absent(value: object) -> bool:
    """Whether files write `value` for a field that a message does not have."""
    return value is None or (isinstance(value, str | list | tuple) and not value)


def trains(message: Mapping[str, Any]) -> bool:
    """Whether a reply is trained, as fields of `TRAINED` say; raises ValueError if they are odd."""
    marks = {name: message[name] for name in TRAINED if message.get(name) is not None}
    for name, value in marks.items():
        if value not in (0, 1):
            raise ValueError(f"{name} must be 0 or 1, got {show(value)}")
    return all(marks.values())


def _check(found: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that is no text, or has no meaning in the message's role."""
    role = found["role"]
    for name in ("role", "name", "tool_call_id", "reasoning"):
        if name in found and not isinstance(found[name], str):
            raise ValueError(f"the {name} of a message must be a text, got {show(found[name])}")
    if not role:
        raise ValueError(f"the role of a message must be a text, got {show(role)}")
    if (meant := _ROLE_OF.get(role.strip().lower(), role)) != role:
        raise ValueError(f"the role of a message must be {meant!r}, got {show(role)}")
    for name, right_role in _ROLES.items():
        if name in found and role != right_role:
            raise ValueError(f"{name} stands in a message of role {right_role}, got role {role!r}")


def _call(given: object) -> ToolCall:
    fields = vars(given) if isinstance(given, ToolCall) else given
    function = fields.get("function", fields) if isinstance(fields, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
        raise ValueError(f"a call of a tool has a function with a name, got {show(given)}")
    assert isinstance(fields, Mapping)
    for key, value in {**fields, **function}.items():
        if key not in _CALL and not _is_absent(value):
            call_fields = ", ".join(_CALL)
            raise ValueError(f"a call of a tool has no field {key!r}; it has {call_fields}")
    if not _is_absent(kind := fields.get("type")) and kind != "function":
        raise ValueError(f"the type of a call must be 'function', got {show(kind)}")
    arguments = {} if _is_absent(function.get("arguments")) else function["arguments"]
    what = f"arguments of {name}"
    if not isinstance(arguments, Mapping | str):
        raise ValueError(f"{what} must be an object or JSON text, got {show(arguments)}")
    # A call that a model has made may hold it.
    if fields is given and isinstance(arguments, Mapping) and holds_null(arguments):
        raise ValueError(f"{what} hold null, as parquet fills them: write JSON text")
    if isinstance(arguments, Mapping):
        arguments = json.loads(json_object(what, arguments, allow_nan=True))
    call_id = fields.get("id")
    if not isinstance(call_id, str | None):
        raise ValueError(f"the id of a call must be a text, got {show(call_id)}")
    return ToolCall(call_id or "", name, arguments)


def holds_null(value: object) -> bool:
    """Whether an object holds null, which parquet also writes for fields of other rows."""
    if isinstance(value, Mapping):
        return any(map(holds_null, value.values()))
    if isinstance(value, list):
        return any(map(holds_null, value))
    return value is None


# The bound of `ContentPart.image` in environment.proto.
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
Function = TypeVar("Function", bound=Callable[..., Any])


_LIMIT = kind_of(Count | None)


def _blaming(convert: Function) -> Function:
    """Returns `convert`, whose faults and results out of bounds are failures of the environment."""

    @functools.wraps(convert)
    def converted(*values: object, **named: object) -> Any:  # noqa: ANN401 - of `convert`
        try:
            message = convert(*values, **named)
            check_bounds(message)
            return message
        except (ValueError, ProtocolError) as error:
            raise environment_failed(_fault(error)) from None

    return cast(Function, converted)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {show(value)}")
    return value


@_blaming
def observation(opening: object, own: AnyEnvironment) -> pb.Observation:
    """Converts what `reset` gave and set; raises EnvironmentFailed, which names a wrong value."""
    opened = opening if isinstance(opening, ResetResult) else ResetResult(cast(Any, opening))
    right_reply = _text(own.right_reply, "right_reply")
    wrong = own.wrong_reply
    for reply in wrong if isinstance(wrong, list | tuple) else [wrong]:
        _text(reply, "wrong_reply")
    expected_answer = _text(own.expected_answer, "expected_answer") or right_reply
    answer = expected_answer.encode(errors="replace")
    messages = _messages(opened.messages, "reset()")
    given_reply = _given(opened.reply, "reset()")
    if not given_reply:
        _check_asks(messages, "reset()")
    return pb.Observation(
        messages=messages,
        max_reply_tokens=of_kind("max_reply_tokens", own.max_reply_tokens, _LIMIT),
        tools_json=tools_json(opened.tools) if opened.tools else "",
        given_reply=given_reply,
        expected_answer=answer[:MAX_ANSWER_BYTES].decode(errors="ignore"),
        judges_group=own.judges_group,
        teacher_messages=_teacher_messages(opened.teacher_messages, "reset()"),
    )


def reply_of(command: pb.StepCommand) -> Reply:
    """Returns the reply to pass to the environment's `step`."""
    tokens = command.token_ids
    if not command.HasField("parsed"):
        return Reply(command.reply, token_ids=tokens)
    parsed = command.parsed
    calls = []
    for call in parsed.tool_calls:
        arguments: Mapping[str, object] | str = call.arguments
        with contextlib.suppress(ValueError, RecursionError):
            call_arguments = json.loads(call.arguments)
            arguments = call_arguments if isinstance(call_arguments, dict) else arguments
        calls.append(ToolCall(call.id, call.name, arguments))
    return Reply(
        command.reply,
        content=parsed.content,
        reasoning=parsed.reasoning,
        tool_calls=calls,
        token_ids=tokens,
    )


@_blaming
def verdict(result: object, *, gives: bool) -> pb.Verdict:
    """Converts the result of `step`; raises EnvironmentFailed if it is invalid or out of bounds.

    `gives` says that the environment gives the replies.
    """
    if not isinstance(result, StepResult):
        raise ValueError(f"step() must return a StepResult, got {show(result)}")
    done = plain(result.done)
    result_messages = result.messages
    if not isinstance(done, int) or done not in (0, 1):
        raise ValueError(f"done must be True or False, got {show(done)}")
    messages = [] if _is_absent(result_messages) else _messages(result_messages, "step()")
    if not done and not messages:
        raise ValueError("step() must give messages when the episode is not done")
    if done and messages and not gives:
        raise ValueError("step() gives messages that nobody will read: done is True")
    if done and result.tools is not None:
        raise ValueError("step() names tools that nobody will call: done is True")
    if done and result.reply is not None:
        raise ValueError("step() gives a reply that nobody will read: done is True")
    given_reply = _given(result.reply, "step()")
    if not (done or given_reply):
        _check_asks(messages, "step()")
    return pb.Verdict(
        reward=_finite(result.reward, "the reward"),
        done=bool(done),
        messages=messages,
        metrics=_numbers(result.metrics, "metrics", "names", "metric"),
        tools_json="" if result.tools is None else tools_json(result.tools),
        given_reply=given_reply,
        token_rewards=_by_token(result.token_rewards, "token_rewards"),
        teacher_messages=_teacher_messages(result.teacher_messages, "step()"),
    )


def _teacher_messages(messages: object, where: str) -> list[pb.ChatMessage]:
    if _is_absent(messages):
        return []
    teacher_messages = _messages(messages, f"teacher_messages of {where}")
    _check_asks(teacher_messages, f"teacher_messages of {where}")
    return teacher_messages


@_blaming
def agent_observation(own: AnyEnvironment) -> pb.Observation:
    """Returns an agent's observation, without messages; raises EnvironmentFailed if it is wrong."""
    return pb.Observation(
        is_agent=True,
        max_reply_tokens=of_kind("max_reply_tokens", own.max_reply_tokens, _LIMIT),
        judges_group=own.judges_group,
    )


def finished_episode(data: bytes, task: object) -> FinishedEpisode:
    """Returns a member of a group for `judge_group`; raises ProtocolError for other bytes."""
    episode = decode(pb.FinishedEpisode, data)
    return FinishedEpisode(
        task=task,
        replies=tuple(map(reply_of, episode.replies)),
        reward=episode.reward,
        metrics=dict(episode.metrics),
        truncated=episode.truncated,
        member=episode.member,
    )


@_blaming
def group_verdict(result: object, number: int) -> pb.GroupVerdict:
    """Converts what `judge_group` gave for `number` episodes; raises EnvironmentFailed."""
    rewards = _listed(result)
    if rewards is None or len(rewards) != number:
        what = f"judge_group() must return a reward for each of {number} episodes"
        raise ValueError(f"{what}, got {show(result)}")
    verdicts = []
    for place, reward in enumerate(rewards):
        what = f"the reward of episode {place}"
        if isinstance(reward, GroupReward):
            metrics = _numbers(reward.metrics, "metrics", "names", "metric")
            verdicts.append(pb.EpisodeVerdict(reward=_finite(reward.reward, what), metrics=metrics))
        else:
            verdicts.append(pb.EpisodeVerdict(reward=_finite(reward, what)))
    return pb.GroupVerdict(verdicts=verdicts)


@_blaming
def agent_result(result: object) -> pb.AgentResult:
    """Converts the result of `run`; raises EnvironmentFailed if it is invalid or out of bounds."""
    if not isinstance(result, AgentOutcome):
        if not isinstance(result, SupportsFloat):
            what = "run() must return a number or an AgentOutcome"
            raise ValueError(f"{what}, got {show(result)}")
        result = AgentOutcome(_finite(result, "the reward"))
    rewards = result.reply_rewards
    replies = []
    if not isinstance(rewards, Mapping) or not all(isinstance(name, str) for name in rewards):
        what = "reply_rewards must map ids of answers to rewards"
        raise ValueError(f"{what}, got {show(rewards)}")
    for name, value in rewards.items():
        what = f"the reward of reply {show(name)}"
        if (numbers := _listed(value)) is None:
            replies.append({"reply_id": name, "reward": _finite(value, what)})
        else:
            replies.append({"reply_id": name, "token_rewards": _by_token(numbers, what)})
    return pb.AgentResult(
        reward=_finite(result.reward, "the reward"),
        metrics=_numbers(result.metrics, "metrics", "names", "metric"),
        shares=_numbers(result.shares, "shares", "branches", "share of"),
        rewards=_numbers(result.rewards, "rewards", "branches", "reward of"),
        reply_rewards=replies,
    )


def _fault(error: Exception) -> str:
    """Returns the text of an error; protobuf does not name a text that it cannot encode."""
    if isinstance(error, UnicodeEncodeError):
        got = error.object[max(error.start - 20, 0) :]
        return f"texts must be without surrogates, got {show(got)}"
    return str(error)


def _numbers(given: object, several: str, names: str, one: str) -> dict[str, float]:
    """Returns numbers by name, which is that of a branch if `names` is "branches"."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{several} must map {names} to numbers, got {show(given)}")
    for name in given if names == "branches" else ():
        if not isinstance(name, str) or BRANCH_NAME.fullmatch(name) is None:
            what = f"{several} are of branches, with names of 1 to 64 letters, digits and ._:+-"
            raise ValueError(f"{what}, got {show(name)}")
    if len({"", *map(str, given)}) <= len(given):
        raise ValueError(f"{several} must have names that differ, got {show(given)}")
    return {str(name): _finite(value, f"the {one} {name!r}") for name, value in given.items()}


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
        raise ValueError(f"{what} must be a list of numbers, got {show(rewards)}")
    return [_finite(value, f"number {place} of {what}") for place, value in enumerate(numbers, 1)]


def _finite(value: object, what: str) -> float:
    if isinstance(value, SupportsFloat):
        try:
            number = float(value)
        except (ValueError, OverflowError, TypeError, RuntimeError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise ValueError(f"{what} must be a finite number, got {show(value)}")


def _messages(messages: object, source: str) -> list[pb.ChatMessage]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ValueError(f"{source} must give a list of messages, got {show(messages)}")
    chat_messages = []
    for value in messages:
        try:
            message = read_message(value)
            is_text = isinstance(message.content, str)
            chat_messages.append(
                pb.ChatMessage(
                    role=message.role,
                    content=message.content if isinstance(message.content, str) else "",
                    tool_call_id=message.tool_call_id,
                    parts=[] if is_text else map(content_part, message.content),
                    name=message.name,
                    tool_calls=[
                        pb.ToolCall(id=call.id, name=call.name, arguments=call.text)
                        for call in message.tool_calls
                    ],
                    reasoning=message.reasoning,
                )
            )
        except ValueError as error:
            raise ValueError(f"a message of {source}: {_fault(error)}") from None
    return chat_messages


def _check_asks(messages: Sequence[pb.ChatMessage], source: str) -> None:
    """Raises ValueError for messages that end with a reply, which a template would close."""
    if messages[-1].role == "assistant":
        raise ValueError(
            f"{source} ends with a reply, of role 'assistant': the model is to give it"
        )


def _given(reply: object, source: str) -> str:
    if reply is None:
        return ""
    if isinstance(reply, str) and reply:
        return reply
    raise ValueError(
        f"the reply of {source} must be None or a text that is not empty, got {show(reply)}"
    )


def content_part(part: object) -> pb.ContentPart:
    """Converts a text or an image, whose file is read here; raises ValueError."""
    if not isinstance(part, Mapping):
        raise ValueError(f"a part must be {_FORMS}, got {show(part)}")
    kind = part.get("type")
    url = part.get("image_url")
    fields = part.items() if not isinstance(url, Mapping) else [*part.items(), *url.items()]
    present = {name for name, value in fields if value is not None}
    if unread := present - _FIELDS.get(str(kind), present):
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
