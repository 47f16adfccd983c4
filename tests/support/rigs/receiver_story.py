"""Runs `receiver_rig.py`, and judges what it saw."""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from slipstream.client.launch.placement import uses_gpus

from support.ranks.loader_ranks import in_ranks
from support.rigs.completed import completed

RIGS = Path(__file__).parent


def run_program(*command: str, limit_s: float) -> str:
    """What the program that the command names prints; fails with its output when it fails.

    Without GPUs it is forked by a process that has imported vLLM.
    """
    if not uses_gpus():
        ((text,),) = in_ranks(1, _forked, command)
        return str(text)
    paths = os.pathsep.join(sys.path)
    done = completed(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": paths},
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def _forked(_rank: int, command: tuple[str, ...]) -> list[str]:
    sys.argv = list(command)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        runpy.run_path(command[0], run_name="__main__")
        file.seek(0)
        # A string alone would be a failure.
        return [file.read()]


def run_rig(
    folder: Path, *arguments: str, limit_s: float
) -> dict[str, list[dict[str, Any]]]:
    """The lines of its report by their kind."""
    program = str(RIGS / "receiver_rig.py")
    ended = run_program(program, str(folder), *arguments, limit_s=limit_s)
    report: dict[str, list[dict[str, Any]]] = {}
    for line in ended.splitlines():
        if line.startswith('{"what"'):
            fact = json.loads(line)
            report.setdefault(fact["what"], []).append(fact)
            print(line)
    return report


def judge(
    report: dict[str, list[dict[str, Any]]],
    *,
    score_rounding: float = 0.0,
    by_plan: bool = True,
) -> None:
    """What holds over any transport, for a model that a plan covers if `by_plan`.

    `score_rounding`: difference of two scores of the same weights, which may be computed in other
    steps.
    """
    publishes = report["publish"]
    assert all(publish["digests_agree"] for publish in publishes)
    # The first of each layout proves the plan, also when it was left unused by a failure.
    loader = [
        number for number, publish in enumerate(publishes) if not publish["by_plan"]
    ]
    assert loader == ([0, 6] if by_plan else list(range(len(publishes))))
    # An update that comes while nothing runs is never staged.
    assert not any(publish["staged"] for publish in publishes if not publish["is_busy"])
    (scores,) = report["scores"]
    assert scores["bits_equal"]
    assert scores["differ"] <= score_rounding
    assert scores["differ_from_first"] > 1e-3
    (failure,) = report["failure"]
    assert failure["error"]
    (after,) = report["scores_after_failure"]
    assert after["bits_equal"]
    assert after["differ"] <= score_rounding
    (in_flight,) = report["in_flight"]
    assert in_flight["tokens"] == [300]
    assert in_flight["most_versions"] >= 2
    # No token was sampled from anything but the whole weights that its version stands for.
    assert in_flight["gap"] < 0.25 * in_flight["gap_of_others"]
    # An idle engine, and one that rests.
    assert [prefixes["rests"] for prefixes in report["prefixes"]] == [False, True]
    for prefixes in report["prefixes"]:
        assert prefixes["cached_before"] >= 128
        assert prefixes["cached_after"] == 0
