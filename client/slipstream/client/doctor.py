"""Implements `slipstream doctor`, which says what to change on a machine before a run fails on it.

This process checks the machine itself; checks that need heavy imports run as other programs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from slipstream.client.launch.checks import Scene, find_all
from slipstream.client.launch.findings import Finding, Verdict, ok, problem
from slipstream.client.launch.fit import check_fit
from slipstream.client.launch.launcher import learner_overrides, scene_of
from slipstream.client.launch.machine import (
    MIN_MEMORY_GIB,
    ROLE_MEMORY_GIB,
    ROLES,
    check_build,
    check_companions,
    check_disk,
    check_gpus,
    check_limits,
    check_machine,
    check_packages,
)
from slipstream.client.launch.preflight import run_program
from slipstream.client.launch.share import LEARNER, Share, learner_node, learner_nodes
from slipstream.client.terminal import say
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
from slipstream.core.machine.gpus import list_gpus
from slipstream.core.machine.process import raise_open_files
from slipstream.core.settings.config import Config
from slipstream.protocol.access.security import Credentials, bind, create_server
from slipstream.protocol.setup import describe_setup
from slipstream.v1 import status_pb2, status_pb2_grpc

GRACE_S = 1.0
LEARNER_PROGRAM = "slipstream.learner.trainer.doctor"
PROGRAM_LIMIT_S = 120.0
# Seconds in which all nodes of a learner must have started their examination.
MEETING_LIMIT_S = 300.0


async def run_doctor(arguments: argparse.Namespace) -> int:
    """Prints all findings; returns 1 if one of them is a problem, else 0.

    Raises ConfigError for an invalid configuration file.
    """
    raise_open_files()
    path, overrides, role = arguments.path, arguments.overrides, arguments.role
    # Checks that take long say so; stdout may be read by a program.
    with contextlib.redirect_stdout(sys.stderr):
        if path is None:
            if role is not None:
                raise ConfigError(f"--role {role} needs a CONFIG.toml")
            findings = await examine(None)
        elif role is None:
            config = load_config(path, overrides, hub="small")
            findings = await examine(Scene(config, leaves_nothing=True))
        else:
            findings = await _examine_instance(arguments)
    if arguments.json:
        say("\n".join(found.write() for found in findings))
    else:
        say(table(findings))
        say(conclusion(findings))
    return 1 if any(found.verdict is Verdict.PROBLEM for found in findings) else 0


async def examine(scene: Scene | None) -> list[Finding]:
    """Returns the findings about this machine, and about what of a run would start on it, if given.

    A scene without parts is `slipstream run`'s.
    """
    gpus, parts = list_gpus(), scene.parts if scene is not None else frozenset()
    has_gpu, config = bool(gpus), scene.config if scene is not None else None
    least_gib = ROLE_MEMORY_GIB if parts else MIN_MEMORY_GIB
    roles = [part.replace("_", " ") for part in parts - {"controller"}] or list(ROLES)
    findings = [*check_machine(has_gpu=has_gpu, least_gib=least_gib), *check_packages(roles)]
    findings += [*check_gpus(gpus), *check_build(gpus, config)]
    if "learner" in roles and importlib.util.find_spec("torch") is not None:
        findings += await ask_program(LEARNER_PROGRAM)
    if scene is None:
        findings += [*check_limits(has_gpu=has_gpu), check_disk(Path("runs"))]
        return [*findings, *check_companions()]
    share = scene.share if parts else None
    return [*findings, *await find_all(scene), *check_fit(scene.config, gpus, share)]


async def _examine_instance(arguments: argparse.Namespace) -> list[Finding]:
    """Returns the findings about one instance of a role, with the settings of its command."""
    overrides, is_learner = arguments.overrides, arguments.role == LEARNER
    if is_learner:
        overrides = [*learner_overrides(arguments.master), *overrides]
    elif arguments.controller is not None:
        overrides = [*overrides, f'controller.address="{arguments.controller}"']
    config = load_config(arguments.path, overrides, hub="small", apart=True)
    share = learner_node(config, arguments.node_rank) if is_learner else Share(servers=1)
    given_s = arguments.connect_timeout_s
    limit_s = MEETING_LIMIT_S if given_s is None else given_s
    findings = await examine(replace(scene_of(config, share, limit_s), leaves_nothing=True))
    nodes, _ = learner_nodes(config)
    if share.has_controller and nodes > 1:
        findings.append(await meet_nodes(config, nodes, limit_s))
    return findings


async def ask_program(module: str, *, limit_s: float = PROGRAM_LIMIT_S) -> list[Finding]:
    """Runs a Python module and returns the findings that it prints.

    Returns a single problem if the module fails or does not end within `limit_s`.
    """
    ended = await run_program([sys.executable, "-m", module], limit_s=limit_s)
    if ended.code is None:
        return [problem("torch", f"{module} did not end within {limit_s:g} s", "see nvidia-smi")]
    if ended.code != 0:
        said = ended.lines[-1] if ended.lines else f"exit code {ended.code}"
        return [problem("torch", f"{module}: {said}", "install the tested versions")]
    return [Finding.read(line) for line in ended.output.splitlines()]


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


class MeetingServicer(status_pb2_grpc.StatusServiceServicer):
    """Serves this node's setup to the other nodes, and records the nodes that have compared it."""

    def __init__(self, setup: status_pb2.Setup, others: int) -> None:
        """Takes this node's setup, and the number of other nodes, which all ask for the setup."""
        self._setup, self._others = setup, others
        self.askers: set[str] = set()
        self.all_asked = asyncio.Event()

    async def GetSetup(  # noqa: N802
        self, request: status_pb2.GetSetupRequest, context: object
    ) -> status_pb2.Setup:
        """Returns the setup with the current time; records a caller that has compared setups."""
        if request.has_compared:
            self.askers.add(request.asker)
            if len(self.askers) >= self._others:
                self.all_asked.set()
        setup = status_pb2.Setup(unix_time_s=time.time())
        setup.MergeFrom(self._setup)
        return setup


async def meet_nodes(config: Config, nodes: int, limit_s: float) -> Finding:
    """Serves this node's setup until all other nodes have compared their setups with it.

    Returns a problem if some nodes have not done so within `limit_s`, else an ok finding.
    """
    area = "nodes"
    try:
        credentials = Credentials.load(config.security)
        server = create_server(credentials)
        with _marked_folder(config) as (run_id, mark):
            setup = describe_setup(config, run_id=run_id, mark=mark)
            servicer = MeetingServicer(setup, nodes - 1)
            status_pb2_grpc.add_StatusServiceServicer_to_server(servicer, server)
            bind(server, config.controller.address, credentials)
            await server.start()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limit_s):
                        await servicer.all_asked.wait()
            finally:
                await server.stop(GRACE_S)
    except ConfigError as error:
        return problem(area, str(error))
    came = ", ".join(sorted(servicer.askers)) or "none"
    if servicer.all_asked.is_set():
        return ok(area, f"all {nodes} are here: this one, {came}")
    return problem(
        area,
        f"{len(servicer.askers)} of {nodes - 1} other nodes asked within {limit_s:g} s: {came}",
        "start this command on all nodes of the learner at once, and see what the others say",
    )


@contextlib.contextmanager
def _marked_folder(config: Config) -> Iterator[tuple[str, str]]:
    """Keeps a file in run.dir during the block; yields a new run id, and the name of the file.

    The file contains the run id. Raises ConfigError if the file cannot be written.
    """
    run_id = f"{config.run.name}-{secrets.token_hex(4)}"
    path = config.run.dir / f".{run_id}"
    made = [folder for folder in (config.run.dir, *config.run.dir.parents) if not folder.exists()]
    try:
        config.run.dir.mkdir(parents=True, exist_ok=True)
        path.write_text(run_id)
        yield run_id, path.name
    except OSError as error:
        raise ConfigError(
            f"run.dir: cannot write into {config.run.dir}: {error.strerror}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
