"""Defines what a check gets, the scene of a command, and what it gives: findings."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from slipstream.client.launch.placement import Share
from slipstream.core.settings.config import Config

# `replay`, `export`: trainer ranks without a run, which train its steps again or write its model.
Part = Literal["controller", "learner", "rollout_server", "replay", "export"]
WHOLE_RUN: frozenset[Part] = frozenset({"controller", "learner", "rollout_server"})
ANY: frozenset[Part] = WHOLE_RUN | {"replay", "export"}
CONTROLLER: frozenset[Part] = frozenset({"controller"})
LEARNER: frozenset[Part] = frozenset({"learner"})
SERVER: frozenset[Part] = frozenset({"rollout_server"})


@dataclass(frozen=True)
class Scene:
    """The settings, and the parts of a run that a command is about to start with them."""

    # The settings, or None for the doctor without settings.
    stated: Config | None = None
    # The parts that start on this machine.
    parts: frozenset[Part] = WHOLE_RUN
    # The share of the roles that starts here.
    share: Share = Share()
    dry_run: bool = False
    # Whether the checks must make no folder or log, as for the doctor.
    leaves_nothing: bool = False
    # Seconds to wait for a controller, or a queue, that others start.
    connect_timeout_s: float = 0.0

    @property
    def config(self) -> Config:
        """The settings; only checks that need none may be made without them."""
        assert self.stated is not None
        return self.stated

    @property
    def has_model(self) -> bool:
        """Whether the model's folder has a config.json; without it, only the doctor continues."""
        return (self.config.model.path / "config.json").is_file()


class Verdict(StrEnum):
    """The verdict of a check: fine, advice, or a problem that prevents a run."""

    OK = "ok"
    # A run works, but slower or with less safety than it could.
    ADVICE = "advice"
    # A run cannot work like this.
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check, as the doctor shows it."""

    # If empty, the area of the check's row.
    area: str
    verdict: Verdict
    # The fact that was seen.
    seen: str
    # The change to make; empty when there is nothing to do.
    remedy: str = ""


def ok(seen: str, *, area: str = "") -> Finding:
    """Returns a finding that asks for no change."""
    return Finding(area, Verdict.OK, seen)


def advice(seen: str, remedy: str, *, area: str = "") -> Finding:
    """Returns a finding that does not stop a run; the remedy makes the run faster or safer."""
    return Finding(area, Verdict.ADVICE, seen, remedy)


def problem(seen: str, remedy: str = "", *, area: str = "") -> Finding:
    """Returns a finding that stops a run; `remedy` is "" if `seen` already says what to change."""
    return Finding(area, Verdict.PROBLEM, seen, remedy)
