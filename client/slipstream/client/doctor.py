"""Implements `slipstream doctor`, which says what to change on a machine before a run fails on it.

It looks at this machine alone; of others only the controller and the queue are asked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from slipstream.client.launch.checks import DOCTOR_LIMIT_S, find_all
from slipstream.client.launch.findings import Finding, Scene, Verdict
from slipstream.client.launch.launcher import learner_overrides, scene_of
from slipstream.client.launch.placement import LEARNER, Share, learner_node
from slipstream.client.terminal import say
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
from slipstream.core.machine.process import raise_open_files


async def run_doctor(arguments: argparse.Namespace) -> int:
    """Prints all findings; returns 1 if one is a problem, else 0; raises ConfigError."""
    raise_open_files()
    path, role = arguments.path, arguments.role
    if path is None and role is not None:
        raise ConfigError(f"--role {role} needs a CONFIG.toml")
    scene = Scene()
    if path is not None:
        overrides = arguments.overrides
        if role == LEARNER:
            overrides = [*learner_overrides(arguments.master), *overrides]
        elif role is not None and arguments.controller is not None:
            overrides = [*overrides, f'controller.address="{arguments.controller}"']
        config = load_config(path, overrides, hub="small", apart=role is not None)
        share = Share(range(config.learner.world_size), config.rollout_server.count)
        if role is not None:
            is_learner = role == LEARNER
            share = learner_node(config, arguments.node_rank) if is_learner else Share(servers=1)
        scene = scene_of(config, share, DOCTOR_LIMIT_S)
    # Checks that take long say so; stdout may be read by a program.
    with contextlib.redirect_stdout(sys.stderr):
        findings = await find_all(replace(scene, leaves_nothing=True))
    if arguments.json:
        say("\n".join(json.dumps(asdict(found)) for found in findings))
    else:
        say(table(findings))
        say(conclusion(findings))
    return 1 if any(found.verdict is Verdict.PROBLEM for found in findings) else 0


def conclusion(findings: Sequence[Finding]) -> str:
    """Returns the last line of the doctor's text, with the numbers of problems and hints."""
    problems = sum(found.verdict is Verdict.PROBLEM for found in findings)
    hints = sum(found.verdict is Verdict.ADVICE for found in findings)
    what = f"{problems} problem{'s' * (problems != 1)}" if problems else "nothing"
    stands = "stand" if problems > 1 else "stands"
    return f"\n{what} {stands} in the way of a run, {hints} hint{'s' * (hints != 1)}"


def table(findings: Sequence[Finding]) -> str:
    """Returns the text for a terminal: a line for each finding, its remedy below it."""
    width = max((len(found.area) for found in findings), default=0)
    lines = []
    for found in findings:
        lines.append(f"{found.verdict.value:8} {found.area:{width}} {found.seen}")
        if found.remedy:
            lines.append(f"{'':8} {'':{width}} -> {found.remedy}")
    return "\n".join(lines)
