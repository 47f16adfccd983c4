"""Defines what a check before a run is, of the kernel or of an extension.

A check gets the scene and returns what it saw: a line, findings, or None if there is nothing to
tell. It raises ConfigError for a problem that needs no remedy in words of its own.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from inspect import isawaitable

from slipstream.client.launch.scene import Finding, Part, Scene, ok

Seen = str | Finding | Iterable[Finding] | None


class Stage(Enum):
    """The order of the checks; a dry run prints its plan after the settings."""

    # Facts that only the doctor tells.
    DOCTOR = "doctor"
    # The settings, with the model's files and the installed packages.
    SETTINGS = "settings"
    # The run's folder and addresses: what is in use now may be free once the settings are right.
    PLACE = "place"
    # Checks that load environments or call other servers: only before a run starts.
    START = "start"


@dataclass(frozen=True)
class Check:
    """The check of one fact that a run needs."""

    area: str
    stage: Stage
    # The check is made for a command that starts one of these parts.
    needs: frozenset[Part]
    look: Callable[[Scene], Seen | Awaitable[Seen]]
    # The remedy for a ConfigError.
    remedy: str = ""
    # Whether it needs no settings.
    of_machine: bool = False
    # Whether a command that starts something says what was seen.
    is_told: bool = False
    # Whether it starts a program, which takes seconds: quick checks are made before it.
    starts_program: bool = False
    # The area behind which the check of an extension is made; it is otherwise the last one.
    after: str = ""

    async def found(self, scene: Scene) -> list[Finding]:
        """Makes the check; returns its findings, or raises ConfigError for a problem."""
        seen = self.look(scene)
        if isawaitable(seen):
            seen = await seen
        if isinstance(seen, str):
            seen = ok(seen)
        findings = [seen] if isinstance(seen, Finding) else seen or ()
        return [replace(finding, area=finding.area or self.area) for finding in findings]
