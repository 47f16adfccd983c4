"""Defines the findings of checks: the fact that a check saw, and whether that prevents a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum


class Verdict(Enum):
    """The verdict of a check: fine, advice, or a problem that prevents a run."""

    OK = "ok"
    # A run works, but slower or with less safety than it could.
    ADVICE = "advice"
    # A run cannot work like this.
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check, as the doctor shows it."""

    area: str
    verdict: Verdict
    # The fact that was seen.
    seen: str
    # The change to make; empty when there is nothing to do.
    remedy: str = ""

    @classmethod
    def read(cls, line: str) -> Finding:
        """Returns the finding in a line that `write` made; raises ValueError if it is not JSON."""
        values = json.loads(line)
        return cls(values["area"], Verdict(values["verdict"]), values["seen"], values["remedy"])

    def write(self) -> str:
        """Returns the finding as one line of JSON."""
        return json.dumps(asdict(self) | {"verdict": self.verdict.value})


def ok(area: str, seen: str) -> Finding:
    """Returns a finding that asks for no change."""
    return Finding(area, Verdict.OK, seen)


def advice(area: str, seen: str, remedy: str) -> Finding:
    """Returns a finding that does not stop a run; the remedy makes the run faster or safer."""
    return Finding(area, Verdict.ADVICE, seen, remedy)


def problem(area: str, seen: str, remedy: str = "") -> Finding:
    """Returns a finding that stops a run; `remedy` is "" if `seen` already says what to change."""
    return Finding(area, Verdict.PROBLEM, seen, remedy)
