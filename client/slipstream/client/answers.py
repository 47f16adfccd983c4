"""Turns what an environment returns into messages; an error names each value that cannot travel.

The bounds of the messages themselves are in environment.proto.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import SupportsFloat, TypeVar

from slipstream.client.agent import BRANCH_NAME, AgentOutcome
from slipstream.client.environment import Message, StepResult
from slipstream.client.loading import environment_failed
from slipstream.protocol.bounds import check_bounds
from slipstream.protocol.errors import ProtocolError
from slipstream.v1 import environment_pb2 as pb

Made = TypeVar("Made", pb.Observation, pb.Verdict, pb.AgentResult)


def _reply_limit(limit: object) -> int:
    if limit is None:
        return 0
    if isinstance(limit, int) and limit >= 1:
        return limit
    raise environment_failed(f"max_reply_tokens must be None or at least 1, got {_show(limit)}")


def observation(messages: object, reply_limit: object) -> pb.Observation:
    """Converts what `reset` returned, with the environment's `max_reply_tokens`.

    EnvironmentFailed names a value that cannot travel.
    """
    made = pb.Observation(
        messages=_messages(messages, "reset()"), max_reply_tokens=_reply_limit(reply_limit)
    )
    return _bounded(made)


def verdict(result: object) -> pb.Verdict:
    """Converts what `step` returned; EnvironmentFailed if it is no StepResult or out of bounds."""
    if not isinstance(result, StepResult):
        raise environment_failed(f"step() must return a StepResult, got {_show(result)}")
    if result.done not in (True, False):
        raise environment_failed(f"done must be True or False, got {_show(result.done)}")
    if not result.done and not result.messages:
        raise environment_failed("step() must give messages when the episode is not done")
    if result.done and result.messages:
        raise environment_failed("step() gives messages that nobody will read: done is True")
    made = pb.Verdict(
        reward=_finite(result.reward, "the reward"),
        done=bool(result.done),
        messages=_messages(result.messages, "step()") if result.messages else [],
        metrics=_metrics(result.metrics),
    )
    return _bounded(made)


def agent_observation(reply_limit: object) -> pb.Observation:
    """Returns the observation of an agent, with its `max_reply_tokens`."""
    return _bounded(pb.Observation(is_agent=True, max_reply_tokens=_reply_limit(reply_limit)))


def agent_result(result: object) -> pb.AgentResult:
    """Converts what `run` returned; EnvironmentFailed if it is no result or out of bounds."""
    if not isinstance(result, AgentOutcome):
        if not isinstance(result, SupportsFloat):
            what = "run() must return a number or an AgentOutcome"
            raise environment_failed(f"{what}, got {_show(result)}")
        result = AgentOutcome(_finite(result, "the reward"))
    made = pb.AgentResult(
        reward=_finite(result.reward, "the reward"),
        metrics=_metrics(result.metrics),
        shares=_shares(result.shares),
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
        raise environment_failed(f"metrics must map names to numbers, got {_show(metrics)}")
    return {str(name): _finite(value, f"the metric {name!r}") for name, value in metrics.items()}


def _shares(shares: object) -> dict[str, float]:
    if not isinstance(shares, Mapping):
        raise environment_failed(f"shares must map branches to numbers, got {_show(shares)}")
    for name in shares:
        if not isinstance(name, str) or BRANCH_NAME.fullmatch(name) is None:
            what = "shares are of branches, with names of 1 to 64 letters, digits and ._:+-"
            raise environment_failed(f"{what}, got {_show(name)}")
    return {name: _finite(value, f"the share of {name!r}") for name, value in shares.items()}


def _finite(value: object, what: str) -> float:
    if isinstance(value, SupportsFloat):
        try:
            number = float(value)
        except (ValueError, OverflowError, TypeError, RuntimeError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise environment_failed(f"{what} must be a finite number, got {_show(value)}")


def _messages(messages: object, source: str) -> list[pb.ChatMessage]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise environment_failed(f"{source} must give a list of messages, got {_show(messages)}")
    return [_message(message, source) for message in messages]


def _message(message: object, source: str) -> pb.ChatMessage:
    if isinstance(message, Message):
        role, content = message.role, message.content
    elif isinstance(message, Mapping) and set(message) == {"role", "content"}:
        role, content = message["role"], message["content"]
    else:
        raise environment_failed(
            f"a message of {source} has role and content alone, got {_show(message)}"
        )
    if not isinstance(role, str) or not role or not isinstance(content, str):
        raise environment_failed(
            f"role and content of a message of {source} must be strings, got {_show(message)}"
        )
    return pb.ChatMessage(role=role, content=content)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
