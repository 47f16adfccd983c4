"""The rules between text and JSON: what a model reads of an observation, what its reply does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from slipstream.core.errors import ConfigError
from slipstream.environments.frameworks.packages import import_function

Action: TypeAlias = dict[str, Any]
# Any value of JSON.
Cell: TypeAlias = Any

FIELD = re.compile(r"\{(\w+)\}")
FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)
# No longer text of a reply is read as a number.
MAX_CHARACTERS = 40
REFERENCE = re.compile(r"[\w.]+:\w+")


class NoAction(Exception):
    """A reply that is no action of the environment."""


def action_maker(rule: str | Mapping[str, Any]) -> Callable[[str], Action]:
    """Returns the function of a reply that `rule` stands for; it raises NoAction.

    ConfigError when `rule` is none.
    """
    if rule == "json":
        return _json_action
    if isinstance(rule, str):
        called = import_function("action", rule)

        def by_function(reply: str) -> Action:
            try:
                made = called(reply)
            except ValueError as error:
                raise NoAction(str(error)) from error
            if not isinstance(made, Mapping):
                raise TypeError(f"{rule} must return the fields of an action, got {made!r}")
            return dict(made)

        return by_function
    if not {"reply", "number"} & set(FIELD.findall(json.dumps(rule))):
        raise ConfigError(f"action must name {{reply}} or {{number}} in a text, got {dict(rule)}")
    return lambda reply: dict(_filled(rule, reply))


def observation_text(rule: str | None) -> Callable[[Mapping[str, Any]], str]:
    """Returns the function of an observation that `rule` stands for; ConfigError if it is none."""
    if rule is None:
        return _as_json
    if REFERENCE.fullmatch(rule):
        called = import_function("observation", rule)
        return lambda observation: str(called(observation))
    named = FIELD.findall(rule)
    if not named:
        raise ConfigError(f"observation must name a field of it as {{FIELD}}, got {rule!r}")

    def by_text(observation: Mapping[str, Any]) -> str:
        for name in named:
            if name not in observation:
                known = ", ".join(observation)
                raise KeyError(f"the observation has no field {name!r}; its fields are {known}")
        return FIELD.sub(lambda found: _as_text(observation[found[1]]), rule)

    return by_text


def _as_json(observation: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in observation.items() if name != "metadata"}
    return json.dumps(shown, ensure_ascii=False)


def _as_text(value: Cell) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json_action(reply: str) -> Action:
    """Reads the reply, or the last block between ``` in it, as a JSON object."""
    blocks = FENCED.findall(reply)
    try:
        action = json.loads(blocks[-1] if blocks else reply)
        # Python reads Infinity and 1e999, which JSON cannot hold.
        json.dumps(action, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise NoAction(str(error)) from error
    if not isinstance(action, dict):
        raise NoAction(f"an action is a JSON object, got {reply[:100]!r}")
    return action


def _filled(rule: Cell, reply: str) -> Cell:
    """Puts the reply into the texts of a rule; a text that is {number} alone becomes a number."""
    if isinstance(rule, Mapping):
        return {name: _filled(value, reply) for name, value in rule.items()}
    if isinstance(rule, list):
        return [_filled(value, reply) for value in rule]
    if not isinstance(rule, str):
        return rule
    number = ""
    if "{number}" in rule:
        numbers = NUMBER.findall(reply)
        if not numbers:
            raise NoAction(f"there is no number in {reply[:100]!r}")
        number = numbers[-1]
        if len(number) > MAX_CHARACTERS:
            raise NoAction(f"a number of over {MAX_CHARACTERS} characters: {number[:100]!r}")
        if rule == "{number}":
            return float(number) if "." in number else int(number)
    known = {"reply": reply, "number": number}
    return FIELD.sub(lambda found: known.get(found[1], found[0]), rule)
