"""The settings of a whole run, checked by all rules that need no file."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

from pydantic import JsonValue, model_validator
from slipstream.core.machine.address import address_parts, is_loopback
from slipstream.core.settings.table_rules import TABLE_RULES
from slipstream.core.settings.tables import Tables


class Config(Tables):
    """All settings of a run, after the rules between them are checked."""

    def submission_refusal(self, reference: str) -> str:
        """Returns why clients may not submit the environment `reference`, or "" if they may."""
        module = reference.partition(":")[0]
        cause = ""
        allowed = self.security.submitted_modules
        if allowed is None and is_below(module, _ANY_CODE):
            cause = " (unless it is set: the arguments of an environment may name any program)"
            allowed = ()
        elif allowed is None:
            address = self.controller.address
            if is_loopback(address_parts(address)[0]):
                return ""
            modules = (section.reference.partition(":")[0] for section in self.environments)
            cause = f" (those of the run's environments, since {address} is not loopback)"
            allowed = tuple(
                name for name in dict.fromkeys(modules) if not is_below(name, _ANY_CODE)
            )
        if is_below(module, allowed):
            return ""
        listed = ", ".join(allowed) or "none"
        return f"security.submitted_modules has no {module}, only {listed}{cause}"

    @model_validator(mode="after")
    def _keeps_the_rules(self) -> Self:
        for problem in itertools.chain.from_iterable(rule(self) for rule in TABLE_RULES):
            raise ValueError(problem)
        return self


# Modules of environments whose arguments name a program or a package that is run.
_ANY_CODE = ("slipstream.environments.command", "slipstream.environments.frameworks")


def is_below(name: str, above: Iterable[str]) -> bool:
    """Whether a dotted name is one of `above`, or begins with one and a dot."""
    return any(f"{name}.".startswith(f"{upper}.") for upper in above)


# Tables that hold or locate secrets, and notes on settings that are none themselves.
_UNTOLD = ("queue.redis_url", "queue.controller", "queue.rollout_server", "security")
NOTES = ("automatic", "sources")
# Settings whose values are secrets, by the end of their names.
_SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:(?:api|access|secret|private|service|signing|openai|anthropic)[_-]?keys?"
    r"|secrets?|password|passwd|passphrase|pwd|credentials?|authorization"
    r"|(?:access|auth|api|hf|bearer|github|judge|service)[_-]?token)$|^token$",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"://[^/@\s]+@")


def told_settings(settings: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns all settings but secrets, by names such as `environments.0.weight`."""
    return {
        name: value
        for name, value in flat_settings(settings)
        if not is_below(name, (*_UNTOLD, *NOTES))
        and not any(map(_SECRET_NAME.search, name.split(".")))
        and not (isinstance(value, str | list) and _URL_PASSWORD.search(str(value)))
    }


def flat_settings(
    table: Mapping[str, JsonValue], above: str = ""
) -> Iterator[tuple[str, JsonValue]]:
    """Yields the dotted names and values of all settings of a table, without its tables."""
    for key, value in table.items():
        name = f"{above}{key}"
        if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
            value = {str(place): inner for place, inner in enumerate(value)}
        if isinstance(value, dict) and value:
            yield from flat_settings(value, f"{name}.")
        else:
            yield name, value
