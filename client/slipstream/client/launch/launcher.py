"""Implements the commands that start a whole run on this machine, or one part of a run.

With `--dry-run` a command starts nothing: it prints the resolved settings, the trainer's parallel
groups, and whatever this machine lacks. A command returns its exit code, after the end of what it
started, or raises ConfigError or RunFailed with the cause.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path

from slipstream.client import run_folder
from slipstream.client.heldout import comparison_lines
from slipstream.client.launch.audits import audit_all, audit_class
from slipstream.client.launch.check import Stage
from slipstream.client.launch.checks import DOCTOR_LIMIT_S, find_all, require, running_id
from slipstream.client.launch.children import (
    rank_environments,
    start_child,
    start_in_run,
    stop_signal,
)
from slipstream.client.launch.fit import (
    describe_engine,
    gpu_needs,
    gpu_obstacles,
    journal_warning,
    processor_problems,
)
from slipstream.client.launch.machine import require_packages, warn_unproved
from slipstream.client.launch.placement import SERVER as SERVER_PROGRAM
from slipstream.client.launch.placement import (
    Share,
    describe_sharing,
    fit_here,
    learner_node,
    node_gpus,
    uses_gpus,
)
from slipstream.client.launch.preflight import hold_address, prove
from slipstream.client.launch.run_processes import GRACE_S, RunProcesses
from slipstream.client.launch.scene import CONTROLLER, LEARNER, SERVER, Scene, Verdict
from slipstream.client.log_lines import speak_by
from slipstream.client.page import PAGE, differences, page_kept, reply_lines, settings_in
from slipstream.client.terminal import complain, counted, say
from slipstream.core.configuration.automatic import describe_plan
from slipstream.core.configuration.batch_bytes import BatchBytes
from slipstream.core.configuration.batch_costs import BatchCosts
from slipstream.core.configuration.config_file import (
    check_sizes,
    dump_config,
    load_config,
    model_warnings,
)
from slipstream.core.configuration.roles import of_policy, role_settings
from slipstream.core.errors import (
    DONE,
    RUN_STOPPED,
    USAGE_ERROR,
    ConfigError,
    RunFailed,
    SlipstreamError,
    check_server_id,
)
from slipstream.core.extension import Program, program
from slipstream.core.logs import formatter
from slipstream.core.machine.address import address_parts
from slipstream.core.machine.process import raise_open_files
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.run_folder import CHECKPOINTS, log_path
from slipstream.core.settings.config import Config
from slipstream.core.settings.parallel_rules import RankLayout
from slipstream.core.settings.tables import NO_ENVIRONMENT
from slipstream.protocol.access.run_token import run_credentials
from slipstream.protocol.access.security import without_password
from slipstream.protocol.checkpoints import folders_left_by

EXPORT = "slipstream.learner.trainer.export_checkpoint"
# Seconds after `rollout_server.drain_timeout_s` in which a server ends its engine.
SERVER_GRACE_S = 30.0
# Replies that the end of the quickstart shows.
SHOWN_REPLIES = 3
# Seconds in which a queue that another program starts must answer.
QUEUE_LIMIT_S = 30.0
TINY_MODEL = "slipstream.learner.trainer.tiny_model"
SET_ASIDE = "slipstream.learner.controller.set_aside_batch"
_CLIENT_LOOP = ("controller.client_loop=true", "learner.shared_prefix_tokens=0")


async def run_all(path: Path | None, overrides: Sequence[str], *, dry_run: bool) -> int:
    """Runs `slipstream run`: controller, trainer ranks and rollout servers on this machine."""
    raise_open_files()
    config = load_config(path, overrides, hub="small" if dry_run else "whole", gpus=node_gpus())
    share = Share(range(config.learner.world_size), config.rollout_server.count)
    return await _carry_out(config, share, dry_run=dry_run)


async def run_tinker(
    path: Path, overrides: Sequence[str], *, port: int, in_flight: bool, dry_run: bool
) -> int:
    """Runs `slipstream tinker`: a run whose loop is a client's own, behind an HTTP process."""
    raise_open_files()
    with hold_address(f"127.0.0.1:{port}", what="--port") as address:
        *_, chosen_port = address_parts(address)
    overrides = [*_CLIENT_LOOP, *overrides]
    config = load_config(path, overrides, hub="small" if dry_run else "whole")
    share = Share(range(config.learner.world_size), config.rollout_server.count)
    say(f"base_url=http://{address} and any api_key that begins with tml-")
    beside = (
        program("tinker"),
        ["--port", str(chosen_port), *(["--in-flight"] if in_flight else [])],
    )
    return await _carry_out(config, share, dry_run=dry_run, beside=beside)


async def run_quickstart(overrides: Sequence[str]) -> int:
    """Runs `slipstream quickstart`: makes a tiny model if it is missing, then trains it."""
    require_packages("learner", "rollout server")
    path = Path(__file__).parents[1] / "quickstart.toml"
    default_model = load_config(path).model.path
    model = load_config(path, overrides).model.path
    # Any other folder is the user's: nothing is written there.
    if model == default_model and not any(model.glob("*.safetensors")):
        log = run_folder.make_folder(model.parent) / f"{model.name}.log"
        await run_program("tiny model", TINY_MODEL, [str(model)], log)
        log.unlink()
    code = await run_all(path, overrides, dry_run=False)
    if code == 0:
        config = load_config(path, overrides)
        folder = config.run_dir
        lines = comparison_lines(folder, config.model.path, SHOWN_REPLIES)
        lines = lines or reply_lines(folder, config.model.path, SHOWN_REPLIES)
        replies = "".join(f"\n  {line}" for line in lines)
        say(f"{replies}\n\n  see curves and more replies: {folder / PAGE}")
        say(f"  next: slipstream export {folder} --out model, and docs/tutorial.md")
    return code


async def run_learner(
    path: Path,
    overrides: Sequence[str],
    *,
    node_rank: int | None,
    master: str | None,
    connect_timeout_s: float | None = None,
    dry_run: bool,
) -> int:
    """Runs `slipstream learner`: the trainer ranks of this node, on node 0 the controller too."""
    raise_open_files()
    overrides = [*learner_overrides(master), *overrides]
    config = load_config(path, overrides, hub="small" if dry_run else "whole", apart=True)
    share = learner_node(config, node_rank)
    return await _carry_out(config, share, connect_timeout_s, dry_run=dry_run)


async def _carry_out(
    config: Config,
    share: Share,
    connect_timeout_s: float | None = None,
    *,
    dry_run: bool,
    beside: tuple[Program, Sequence[str]] | None = None,
) -> int:
    scene = scene_of(config, share, connect_timeout_s, dry_run=dry_run)
    if not dry_run:
        speak_by(formatter(config, "command"))
        # Imports of torch and vLLM, which some checks need, take ten seconds.
        say(f"run {config.run.name} is checked: its files, this machine, its environments")
    facts: list[str] = []
    if not await _may_start(scene, facts):
        return 0
    async with AsyncExitStack() as stack:
        address = config.controller.address
        if share.has_controller:
            address = stack.enter_context(hold_address(address))
        config, placement, _ = fit_here(config, share)
        servers = len(placement.servers) or share.servers
        await require(replace(scene, stated=config), Stage.START)
        stack.enter_context(run_folder.hold_run_folder(config, node_rank=share.node_rank))
        # Two commands may start one run together: the one that is refused says nothing else.
        for fact in facts:
            say(fact)
        before = settings_in(config.run_dir) if share.has_controller else {}
        if share.has_controller:
            run_id = run_folder.begin_run(config, address)
        else:
            run_id = await running_id(scene)
        processes = RunProcesses(
            run_folder.identified(config, address, run_id),
            run_credentials(config),
            placement,
            node_rank=share.node_rank,
            stated=config,
        )
        await stack.enter_async_context(processes)
        settings = [before, settings_in(config.run_dir)]
        for name, (was, now) in differences(settings) if before else ():
            say(f"changed since the run's last start: {name} is {now}, was {was}")
        if share.has_controller:
            processes.start_controller(num_servers=servers)
        processes.keep_trainers(share.ranks)
        for number in range(servers):
            processes.keep_rollout_server(number)
        if beside is not None:
            processes.keep_beside(*beside)
        if share.has_controller:
            await stack.enter_async_context(page_kept(config.run_dir, processes.warn))
        return await processes.wait()


async def run_rollout_server(
    path: Path,
    overrides: Sequence[str],
    *,
    controller: str | None,
    server_id: str | None,
    connect_timeout_s: float,
    dry_run: bool,
) -> int:
    """Runs one server until it has left its controller; raises ConfigError if it cannot start.

    Returns RUN_STOPPED if the run may go on later, else 0.
    """
    raise_open_files()
    name = check_server_id(server_id or f"{socket.gethostname()}-{secrets.token_hex(3)}")
    if controller is not None:
        overrides = [*overrides, f'controller.address="{controller}"']
    config = load_config(path, overrides, hub="small" if dry_run else "whole", apart=True)
    scene = scene_of(config, Share(servers=1), connect_timeout_s, dry_run=dry_run)
    if not dry_run:
        speak_by(formatter(config, "command"))
    # The command of a whole run says the facts.
    if not await _may_start(scene, []):
        return 0
    config, placement, _ = fit_here(config, scene.share)
    await require(replace(scene, stated=config), Stage.START)
    run_folder.make_run_folder(config)
    folder = config.run_dir / "servers" / name
    refusal = f"rollout server {name} runs already in {folder}; choose another --server-id"
    address = config.controller.address
    log = folder / "server.log"
    with run_folder.hold_folder(folder, refusal=refusal):
        identified = run_folder.identified(config, address, await running_id(scene))
        settings = run_folder.write_config(config, folder)
        arguments = ["--config", str(settings), *run_folder.identity_overrides(identified)]
        arguments += ["--controller", address, "--server-id", name]
        environ = placement.server_environment(0)
        module = SERVER_PROGRAM.module
        child = await start_in_run(config, name, module, arguments, environ, log=log)
        say(f"rollout server {name} joins {address}; its log is {log}")
        stop = asyncio.ensure_future(stop_signal())
        ended = asyncio.ensure_future(child.process.wait())
        await asyncio.wait([stop, ended], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        await child.stop(config.rollout_server.drain_timeout_s + SERVER_GRACE_S)
    if child.process.returncode in (DONE, RUN_STOPPED):
        say(f"rollout server {name} has left")
        return child.process.returncode
    raise child.failure()


async def run_check(
    path: Path,
    overrides: Sequence[str],
    *,
    args: str | None = None,
    python: str | None = None,
    timeout_s: float | None = None,
    model: Path | None = None,
) -> int:
    """Runs `slipstream check` for settings, or with the last arguments for MODULE:CLASS."""
    if ":" in str(path) and not path.exists():
        if overrides:
            raise ConfigError(f"an environment is checked without settings, got {overrides[0]!r}")
        arguments = [] if args is None else ["--args", args]
        return await audit_class(
            str(path), arguments, python=python or "", timeout_s=timeout_s or 60.0, model=model
        )
    options = {"--args": args, "--python": python, "--timeout-s": timeout_s, "--model": model}
    if stated := [name for name, value in options.items() if value is not None]:
        raise ConfigError(f"{stated[0]} is for the check of an environment, MODULE:CLASS")
    if path.suffix == ".py" or not (path.suffix or path.exists()):
        raise ConfigError(
            f"{path} is neither CONFIG.toml nor MODULE:CLASS, as {path.stem}:Class is"
        )
    config = load_config(path, overrides, hub="small")
    code = await audit_all(config)
    if not config.algorithm.own_functions:
        return code
    require_packages("learner")
    proved = await prove(config)
    for fault in proved.faults:
        complain(fault)
    for fact in proved.facts:
        say(fact)
    if not proved.faults:
        say("the algorithm's functions are proved")
    return USAGE_ERROR if proved.faults else code


async def run_doctor(arguments: argparse.Namespace) -> int:
    """Prints all findings; returns 1 if one is a problem, else 0; raises ConfigError."""
    raise_open_files()
    path = arguments.path
    role = arguments.role
    if path is None and role is not None:
        raise ConfigError(f"--role {role} needs a CONFIG.toml")
    scene = Scene()
    if path is not None:
        overrides = arguments.overrides
        if role == "learner":
            overrides = [*learner_overrides(arguments.master), *overrides]
        elif role is not None and arguments.controller is not None:
            overrides = [*overrides, f'controller.address="{arguments.controller}"']
        gpus = node_gpus() if role is None else None
        config = load_config(path, overrides, hub="small", apart=role is not None, gpus=gpus)
        share = Share(range(config.learner.world_size), config.rollout_server.count)
        if role is not None:
            is_learner = role == "learner"
            share = learner_node(config, arguments.node_rank) if is_learner else Share(servers=1)
        scene = scene_of(config, share, DOCTOR_LIMIT_S)
    # Checks that take long say so; stdout may be read by a program.
    with contextlib.redirect_stdout(sys.stderr):
        findings = await find_all(replace(scene, leaves_nothing=True))
    verdicts = [finding.verdict for finding in findings]
    problems = verdicts.count(Verdict.PROBLEM)
    hints = verdicts.count(Verdict.ADVICE)
    if arguments.json:
        say("\n".join(json.dumps(asdict(finding)) for finding in findings))
        return int(problems > 0)
    width = max((len(finding.area) for finding in findings), default=0)
    for finding in findings:
        say(f"{finding.verdict.value:8} {finding.area:{width}} {finding.seen}")
        if finding.remedy:
            say(f"{'':8} {'':{width}} -> {finding.remedy}")
    what = counted(problems, "problem") if problems else "nothing"
    stands = "stand" if problems > 1 else "stands"
    say(f"\n{what} {stands} in the way of a run, {counted(hints, 'hint')}")
    return int(problems > 0)


async def run_set_aside(folder: Path, step: int, groups: Sequence[str]) -> int:
    """Runs `slipstream set-aside`: a resumed run leaves out a batch, or `groups` of it."""
    run_folder.settings_of(folder)
    refusal = f"{folder} is written by a run that goes on; end it first"
    log = log_path(folder, "set-aside")
    with run_folder.hold_folder(folder, refusal=refusal):
        log.unlink(missing_ok=True)
        arguments = [str(folder), str(step), *groups]
        code = await run_program("set-aside", SET_ASIDE, arguments, log, fine=(0, USAGE_ERROR))
    message = log.read_text().strip().removeprefix("slipstream: ")
    if code == USAGE_ERROR:
        raise ConfigError(message)
    say(f"{message}; run the command that started the run again: it trains another batch")
    return 0


async def run_export(folder: Path, step: int | None, out: Path | None) -> int:
    """Runs `slipstream export`: one trainer rank writes a checkpoint as a Hugging Face folder."""
    path = run_folder.settings_of(folder)
    config = of_policy(load_config(path))
    facts: list[str] = []
    await require(Scene(config, frozenset({"export"})), Stage.SETTINGS, facts=facts)
    version = run_folder.version_to_export(folder, step)
    target = out or folder / CHECKPOINTS / f"hf-{version:06d}"
    written = target.with_name(f"{target.name}-adapters") if config.lora.adapters else target
    run_folder.check_unwritten(written)
    (environ,) = rank_environments(config, range(1))
    environ["WORLD_SIZE"] = environ["LOCAL_WORLD_SIZE"] = "1"
    arguments = ["--config", str(path), "--step", str(version), "--out", str(target)]
    log = log_path(folder, "export")
    adapters = target.with_name(f"{target.name}-adapters")
    left = [*folders_left_by(target), *folders_left_by(adapters)]
    say(f"version {version} is checked, loaded and written; the log is {log}")
    await run_program("export", EXPORT, arguments, log, environ=environ)
    for path in left:
        say(f"{path} is removed, which a call that was killed has left")
    say(f"version {version} is in {written}")
    for fact in facts:
        say(fact)
    if left_out := [name for name in config.lora.adapters if not (written / name).exists()]:
        say(f"left out: {', '.join(left_out)}: this checkpoint has no rank of a client for them")
    return 0


async def run_program(
    name: str,
    module: str,
    arguments: Sequence[str],
    log: Path,
    *,
    environ: Mapping[str, str] = {},
    fine: Sequence[int] = (0,),
) -> int:
    """Returns the program's exit code; raises RunFailed for one that is not in `fine`."""
    child = await start_child(name, module, arguments, log_path=log, environ=environ)
    try:
        code = await child.process.wait()
    finally:
        await child.stop(GRACE_S)
    if code not in fine:
        raise RunFailed(child.describe_end())
    return code


def scene_of(
    config: Config, share: Share, connect_timeout_s: float | None = None, *, dry_run: bool = False
) -> Scene:
    """Returns the input of the checks for a command that starts `share` of the roles."""
    parts = LEARNER if share.ranks else frozenset()
    parts |= CONTROLLER if share.has_controller else frozenset()
    parts |= SERVER if share.servers else frozenset()
    if connect_timeout_s is None:
        # Further nodes of the learner wait for the first one as long as their ranks would.
        connect_timeout_s = QUEUE_LIMIT_S if share.has_controller else config.learner.timeout_s
    return Scene(config, parts, share, dry_run, connect_timeout_s=connect_timeout_s)


def learner_overrides(master: str | None) -> list[str]:
    """Returns an override that sets `learner.master` to `master`, the value of `--master`.

    Without `master`, torchrun's MASTER_ADDR and MASTER_PORT are taken; returns [] without these.
    Put the result before the command line's overrides of settings, so that they take precedence.
    Raises ConfigError if MASTER_ADDR is set without MASTER_PORT.
    """
    if master is None and "MASTER_ADDR" in os.environ:
        host = os.environ["MASTER_ADDR"]
        if "MASTER_PORT" not in os.environ:
            raise ConfigError(f"MASTER_ADDR is {host}, but MASTER_PORT is not set")
        master = f"{host}:{os.environ['MASTER_PORT']}"
    return [] if master is None else [f'learner.master="{master}"']


async def _may_start(scene: Scene, facts: list[str]) -> bool:
    """Makes the checks of settings and places, and prints the plan of a dry run.

    Returns whether the command goes on, and adds to `facts` what it says once it starts. Raises
    SlipstreamError if nothing could start here.
    """
    if not scene.dry_run:
        await require(scene, Stage.SETTINGS, Stage.PLACE, facts=facts)
        warn_unproved(scene)
        return True
    obstacles = await require(scene, Stage.SETTINGS, facts=facts)
    warn_unproved(scene)
    for fact in facts:
        say(f"# {fact}")
    text, lacks = describe_dry_run(scene.config, scene.share)
    say(text.rstrip("\n"), as_it_is=True)
    obstacles += lacks
    obstacles += await require(scene, Stage.PLACE)
    if obstacles:
        lacking = "; ".join(obstacles)
        raise SlipstreamError(f"the settings are right, but nothing can start here: {lacking}")
    return False


def describe_dry_run(config: Config, share: Share) -> tuple[str, tuple[str, ...]]:
    """Returns the plan of a command that would start `share` here, and its obstacles.

    The plan is TOML that `load_config` reads, without passwords; everything but settings is a
    comment. An obstacle is a change that this machine needs first. Of the model's files, only
    config.json is read. Raises ConfigError like `check_sizes`.
    """
    missing = check_sizes(config)
    on_cpu = not uses_gpus()
    engine = [describe_engine(config.rollout_server, on_cpu=on_cpu)] if share.servers else []
    try:
        config, placement, transport = fit_here(config, share)
    except ConfigError as error:
        gpus = [f"The GPUs here do not fit: {error}"]
        misfit = [str(error)]
    else:
        gpus = ["The GPUs of what starts here:", *placement.describe(share.ranks)]
        misfit = [f"GPU memory: {line}" for line in gpu_obstacles(config, placement)]
        gpus += describe_sharing(config, placement)
        gpus += [f"weights travel by {transport}"] if transport else []
        gpus += describe_plan(config)
    notes: list[str] = []
    models = {"The trainer's ranks:": config} | {
        f"The {name} in the same ranks:": role for name, role in role_settings(config).items()
    }
    for title, settings in models.items() if share.ranks else ():
        has_experts = read_model_sizes(settings.model.path).experts > 0
        layout = RankLayout.of(settings.learner.parallel, settings.learner.world_size)
        notes += [title, *layout.describe(has_experts=has_experts).splitlines(), ""]
    warnings = [*config.training_warnings, *model_warnings(config)]
    if share.ranks and not config.controller.client_loop:
        sizes = read_model_sizes(config.model.path)
        batches = BatchBytes.of(config, sizes)
        costs = BatchCosts.of(config, sizes, batches)
        notes += [*batches.describe(num_steps=config.run.steps), *costs.describe(batches), ""]
        warnings += costs.warnings(config, batches)
        if share.has_controller and (journal := journal_warning(config)):
            warnings.append(journal)
    notes += [*gpus, *filter(None, [gpu_needs(config)]), *engine]
    if not config.environments and not config.controller.client_loop:
        warnings.append(NO_ENVIRONMENT)
    for warning in warnings:
        notes += ["", f"Warning: {warning}"]
    if missing:
        notes += ["", "Only sizes were checked. Before a run can start:", *missing]
    # Servers that other commands start may have GPUs.
    lacking = processor_problems(config) if share.servers else ()
    comments = "".join(f"# {note}".rstrip() + "\n" for note in notes)
    return f"{dump_config(without_password(config))}\n{comments}", (*missing, *misfit, *lacking)
