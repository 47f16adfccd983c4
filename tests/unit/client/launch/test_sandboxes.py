"""What `slipstream doctor` says of the sandboxes of a machine."""

import asyncio
import json
from unittest.mock import AsyncMock

import pytest
from slipstream.client.launch import sandboxes
from slipstream.client.launch.preflight import Ended
from slipstream.client.launch.sandboxes import check_sandbox
from slipstream.client.launch.scene import Scene, Verdict, ok
from slipstream.environments.sandbox.sandbox import BACKENDS, bounds_threads, why_not


@pytest.mark.process
def test_the_sandbox_of_this_machine_is_named_with_its_bound_of_threads() -> None:
    finding = asyncio.run(check_sandbox(Scene()))
    reasons = {backend: why_not(backend) for backend in BACKENDS}
    bounding = [name for name in BACKENDS if not reasons[name] and bounds_threads(name)]
    working = [name for name in BACKENDS if not reasons[name]]
    if bounding:
        assert finding == ok(
            f"{bounding[0]}; the kernel bounds the threads of a program"
        )
    elif working:
        assert finding.seen.startswith(
            f"{working[0]}; the threads of a program are only counted"
        )
    else:
        assert all(reason in finding.seen for reason in reasons.values())


@pytest.mark.parametrize(
    ("tried", "seen"),
    [
        (
            [("sandlock", "", False), ("bubblewrap", "", True)],
            "bubblewrap; the kernel bounds the threads of a program",
        ),
        (
            [("sandlock", "", False), ("bubblewrap", "no bwrap", False)],
            "sandlock; the threads of a program are only counted now and then",
        ),
        (
            [("sandlock", "no Landlock", False), ("bubblewrap", "no bwrap", False)],
            "none works here; sandlock: no Landlock; bubblewrap: no bwrap",
        ),
    ],
)
def test_a_sandbox_that_bounds_no_threads_or_none_is_no_problem_but_told(
    monkeypatch: pytest.MonkeyPatch, tried: list[tuple[str, str, bool]], seen: str
) -> None:
    names = ("backend", "reason", "bounds_threads")
    output = json.dumps([dict(zip(names, trial, strict=True)) for trial in tried])
    program = AsyncMock(return_value=Ended(0, (), output))
    monkeypatch.setattr(sandboxes, "run_program", program)
    finding = asyncio.run(check_sandbox(Scene()))
    assert finding.seen == seen
    assert (finding.verdict is Verdict.OK) == ("the kernel bounds" in seen)
    assert "docs/guides/sandbox.md" in finding.remedy or finding.verdict is Verdict.OK
