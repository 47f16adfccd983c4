"""What the doctor finds: facts with a verdict, and what to change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum


class Verdict(Enum):
    """Whether something stands in the way."""

    OK = "ok"
    # It works, but slower or with less safety than it could.
    ADVICE = "advice"
    # A run cannot work like this.
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    area: str
    verdict: Verdict
    # What was seen.
    seen: str
    # What to do; empty when there is nothing to do.
    remedy: str = ""

    @classmethod
    def read(cls, line: str) -> Finding:
        """From a line of `write`; ValueError for anything else."""
        values = json.loads(line)
        return cls(values["area"], Verdict(values["verdict"]), values["seen"], values["remedy"])

    def write(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self) | {"verdict": self.verdict.value})


def ok(area: str, seen: str) -> Finding:
    """Nothing to do."""
    return Finding(area, Verdict.OK, seen)


def advice(area: str, seen: str, remedy: str) -> Finding:
    """It works; the remedy makes it better."""
    return Finding(area, Verdict.ADVICE, seen, remedy)


def problem(area: str, seen: str, remedy: str = "") -> Finding:
    """It cannot work without the remedy; none where `seen` says what must be."""
    return Finding(area, Verdict.PROBLEM, seen, remedy)


def table(findings: Sequence[Finding]) -> str:
    """For a terminal: a line for each finding, remedies below theirs."""
    width = max((len(found.area) for found in findings), default=0)
    lines = []
    for found in findings:
        lines.append(f"{found.verdict.value:8} {found.area:{width}} {found.seen}")
        if found.remedy:
            lines.append(f"{'':8} {'':{width}} -> {found.remedy}")
    return "\n".join(lines)
