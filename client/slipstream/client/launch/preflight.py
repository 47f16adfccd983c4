"""Finds free addresses, and makes the checks that other programs answer.

Such checks are programs of their own, which end with the command. Waits for: the end of such a
program, not of processes that it has started. Unblocked by: the program's end, or its time limit,
at which the program and all processes that it has started are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import glob
import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from slipstream.client.audit_plays import EpisodeLimits
from slipstream.client.launch.remembered import REMEMBERED_S, Remembered, key_of
from slipstream.client.launch.scene import Finding, Scene, problem
from slipstream.client.run_folder import make_folder, make_run_folder
from slipstream.client.terminal import complain, counted, say
from slipstream.core.configuration.config_file import dump_config
from slipstream.core.configuration.roles import role_settings
from slipstream.core.errors import FACT, USAGE_ERROR, WARNING, ConfigError, RunFailed
from slipstream.core.extension import program
from slipstream.core.group_sizes import group_sizes_of
from slipstream.core.hub import DATA_PREFIX
from slipstream.core.machine.address import address_parts, family_of, free_port, is_loopback
from slipstream.core.machine.other_python import worker_program
from slipstream.core.machine.process import open_variables, send_signal
from slipstream.core.models.model_files import missing_tokenizer
from slipstream.core.run_folder import log_path
from slipstream.core.settings.config import Config
from slipstream.core.settings.measurement_sections import EvaluationSection, PlayedSection
from slipstream.core.settings.sections import MAX_TURNS
from slipstream.core.waits import within

TAIL_BYTES = 65536
FUNCTIONS_CHECK = "slipstream.learner.algorithms.functions_check"
MEGATRON_CHECK = "slipstream.learner.trainer.megatron_check"
ENGINE_CHECK = "slipstream.rollout_server.engine_check"
REPLY_ENDS = "slipstream.core.configuration.reply_ends"
# Limit of a check by another program, most of it for imports on a busy machine.
SETTINGS_LIMIT_S = 300.0
# Seconds beyond an environment's own limits in which its worker starts and says where it hangs.
WORKER_GRACE_S = 30.0
# Number of environments that are checked at once: one for each processor, few to save memory.
CHECKS_AT_ONCE = min(8, len(os.sched_getaffinity(0)))
# The calls of such a check that may take as long as the limit: load, two resets and a step.
CHECKED_CALLS = 4
# Seconds of a start in which replies are played to an environment, beyond those of its first task.
RUN_AUDIT_S = 1.0
# Seconds after which a check that still runs is announced, and between two further lines.
SLOW_S = 3.0
AGAIN_S = 30.0


@contextlib.contextmanager
def hold_address(address: str, *, what: str = "controller.address") -> Iterator[str]:
    """Keeps others from `address` until the block ends; yields it, with a free port in place of 0.

    Only sockets that listen with SO_REUSEADDR, as gRPC's do, can use the address meanwhile, so the
    controller may listen there again and again. Other commands are refused by a name of this
    machine, an abstract unix socket, which the kernel frees with this process. Raises ConfigError,
    which begins with `what`, if nothing can listen there.
    """
    host, port = address_parts(address)
    while True:
        chosen_port = port or free_port(host)
        family = family_of(host)
        probe = socket.socket(family, socket.SOCK_DGRAM)
        with socket.socket(family) as listener, socket.socket(socket.AF_UNIX) as name, probe:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, chosen_port))
                if is_loopback(host):
                    # A socket listens there even while the interface is down.
                    probe.connect((host, chosen_port))
                name.bind(f"\0slipstream {listener.getsockname()[:2]}")
            except OSError as error:
                is_taken = error.errno == errno.EADDRINUSE
                if is_taken and not port:
                    continue
                hint = "; another run may have it: choose another port, or 0 for a free one"
                if not is_taken:
                    is_down = error.errno == errno.ENETUNREACH
                    hint = "; its interface is down: ip link set lo up" * is_down
                raise ConfigError(
                    f"{what}: cannot listen on {address}: {error.strerror}{hint}"
                ) from error
            yield f"{address.rpartition(':')[0]}:{chosen_port}"
            return


async def check_megatron(scene: Scene) -> str | None:
    """Lets Megatron check the settings that are passed through to it, without a GPU."""
    config = scene.config
    learners = [config.learner, *(role.learner for role in role_settings(config).values())]
    passes = any(learner.ddp or learner.optimizer or learner.transformer for learner in learners)
    if not passes or importlib.util.find_spec("megatron") is None or not scene.has_model:
        return None
    tables = "learner.ddp, optimizer and transformer"
    accept(await ask(MEGATRON_CHECK, config, late=f"Megatron did not check {tables}"))
    return "Megatron takes what is passed through to it"


async def check_functions(scene: Scene) -> str | None:
    """Checks that the user's own algorithm functions can be imported and called."""
    late = "own functions of the algorithm did not answer"
    names = set(scene.config.algorithm.own_functions.values())
    if not names:
        return None
    accept(await ask(FUNCTIONS_CHECK, scene.config, late=late))
    return f"own functions can be called: {', '.join(sorted(names))}"


class Proved(NamedTuple):
    """A line for each property that a function of the algorithm lacks; facts if none lacks any."""

    faults: list[str]
    facts: list[str]


async def prove(config: Config) -> Proved:
    """Proves the functions of the algorithm, in a program of its own."""
    module = program("prove").module
    checked = await ask(module, config, late="the functions were not proved")
    mark = "slipstream: "
    faults = [line.removeprefix(mark) for line in checked.lines if line.startswith(mark)]
    if checked.code and not faults:
        raise RunFailed("\n".join(checked.lines[-5:]))
    output = checked.output.splitlines()
    facts = [line.removeprefix(FACT) for line in output if line.startswith(FACT)]
    return Proved(faults, facts)


async def check_vllm(scene: Scene) -> str | None:
    """Lets vLLM check what it is passed: `engine`, parsers, a chat template, and variables."""
    server = scene.config.rollout_server
    if server.chat_template is not None and not server.chat_template.is_file():
        raise ConfigError(
            f"rollout_server.chat_template must be a file, got {server.chat_template}"
        )
    names = [*server.engine, *filter(None, (server.tool_parser, server.reasoning_parser))]
    names += ["chat_template"] * (server.chat_template is not None)
    template_values = [
        server.chat_template_kwargs,
        *(x.chat_template_kwargs for x in scene.config.played),
    ]
    names += ["chat_template_kwargs"] * any(template_values)
    names += [name for name in os.environ if name.startswith("VLLM_")]
    if not names or importlib.util.find_spec("vllm") is None:
        return None
    accept(await ask(ENGINE_CHECK, scene.config, late="vLLM did not check rollout_server"))
    return f"vLLM has what is passed through to it: {', '.join(names)}"


async def check_reply_ends(scene: Scene) -> str | None:
    """Finds the tokens and texts that end a reply: where sampling stops, and what exports name."""
    return await reply_ends_line(scene.config) or None


async def reply_ends_line(config: Config) -> str:
    """Returns the line on the ends of replies, or "" where the model cannot be read here.

    The check of the model's files tells what is missing.
    """
    folder = config.model.path
    has_model = (folder / "config.json").is_file()
    if not has_model or missing_tokenizer(folder, config.rollout_server.chat_template):
        return ""
    if importlib.util.find_spec("transformers") is None:
        return ""
    checked = await ask(REPLY_ENDS, config, late="the ends of replies were not found")
    accept(checked)
    return checked.output.strip()


async def ask(module: str, config: Config, *, late: str) -> Ended:
    """Returns the end of a program that reads the settings; `late` says what it did not do."""
    command = [sys.executable, "-m", module]
    settings = dump_config(config).encode()
    checked = await run_program(command, limit_s=SETTINGS_LIMIT_S, given=settings)
    if checked.code is None:
        raise ConfigError(f"{late} within {SETTINGS_LIMIT_S:g} s")
    if checked.code < 0:
        # The settings may be right, so a scheduler may start the command again.
        raise RunFailed(f"{late}: {signal.Signals(-checked.code).name} ended the check")
    return checked


def accept(checked: Ended) -> None:
    """Raises ConfigError with a check's last line if it found a fault; passes its warnings on."""
    if checked.code:
        raise ConfigError((checked.lines or ("it says nothing",))[-1].removeprefix("slipstream: "))
    _pass_on(checked.lines, "")


def _pass_on(lines: Sequence[str], source: str) -> None:
    """Repeats the warnings in a check's output on stderr, since stdout may be read as settings."""
    for line in lines:
        if line.startswith(WARNING):
            complain(f"warning: {source}{line.removeprefix(WARNING)}")


def check_modules(scene: Scene) -> Iterator[Finding]:
    """Looks for modules and files of environments in a dry run, which does not load them."""
    if not scene.dry_run:
        return
    for section in scene.config.played:
        name = section.reference.partition(":")[0].partition(".")[0]
        place = os.getcwd()
        is_there = importlib.util.find_spec(name) or PathFinder.find_spec(name, [place])
        if section.python is None and not is_there:
            yield problem(
                f"{section.name}: there is no module {name}", f"put it into {place} or PYTHONPATH"
            )
        for path in _missing_files(section):
            yield problem(
                f"{section.name}: args.path names no file, {path}", f"put it there, below {place}"
            )


def _missing_files(section: PlayedSection) -> list[str]:
    """Returns the files and patterns in `args.path` of a built-in environment that are not there.

    What the arguments of other environments mean, these alone know.
    """
    paths = section.args.get("path", ())
    if isinstance(paths, str):
        paths = [paths]
    if not section.reference.startswith("slipstream.environments.") or not isinstance(paths, list):
        return []
    names = [path for path in paths if isinstance(path, str) and not path.startswith(DATA_PREFIX)]
    return [name for name in names if not Path(name).exists() and not glob.glob(name)]


async def check_environments(scene: Scene) -> None:
    """Loads every environment in its own process, and where the controller starts audits it.

    An environment with tools needs `tool_parser`, one with images `max_images`. The first failure
    in the order of the settings is raised.

    The last lines that each environment printed replace the run's preflight.log: when all
    environments have played, or when one that printed something fails. A check that has passed in
    the last `REMEMBERED_S` is not made again, unless something that it read has changed.
    """
    config = scene.config
    plays = "controller" in scene.parts
    printed: list[str] = []
    # Agents that call from elsewhere do so in their check too.
    stack = AsyncExitStack()
    variables: dict[str, str] = {}
    if plays and config.agents.listen is not None:
        # It imports an HTTP server, which other commands need not wait for.
        from slipstream.client.agent_front import agent_front

        front = await stack.enter_async_context(agent_front(config))
        variables = front.address.variables()
    environment_checks = _EnvironmentChecks(config, variables, plays=plays)
    tasks = [asyncio.create_task(environment_checks.check(section)) for section in config.played]
    try:
        for section, task in zip(config.played, tasks, strict=True):
            cause, lines = await task
            printed += [f"environment {section.name}:", *lines]
            if cause:
                # A single line is the cause: the environment printed nothing.
                keeps = not scene.leaves_nothing and len(lines) > 1
                log = f" (log: {_keep_printed(config, printed)})" if keeps else ""
                raise ConfigError(f"environment {section.name}: {cause}{log}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await stack.aclose()
    if environment_checks.num_remembered:
        minutes = REMEMBERED_S / 60
        shown = counted(environment_checks.num_remembered, "environment")
        print(f"{shown} passed a check in the last {minutes:g} minutes, which is not repeated")
    if plays and not scene.leaves_nothing:
        path = _keep_printed(config, printed)
        try:
            environment_checks.remembered.save()
        except OSError as error:
            raise ConfigError(f"{path.parent} cannot be written: {error.strerror}") from error


class _EnvironmentChecks:
    """Checks of a run's environments, a few at one time."""

    def __init__(self, config: Config, variables: Mapping[str, str], *, plays: bool) -> None:
        """`variables` are further ones of each check; `plays` says that environments are audited.

        Otherwise they are only loaded.
        """
        self._config = config
        self._variables = variables
        self._plays = plays
        self._places = asyncio.Semaphore(CHECKS_AT_ONCE)
        self.remembered = Remembered(config.run_dir)
        # Checks that had passed before, and were not made again.
        self.num_remembered = 0

    async def check(self, section: PlayedSection) -> tuple[str, tuple[str, ...]]:
        """Returns the cause of a failure, "" without one, and the lines that were printed."""
        name = section.name
        timeout_s = section.timeout_s
        check_python(name, section.python)
        command = audit_command(section, self._config)
        loading = [*command, "--no-play"]
        playing = [*command, "--warn", "--seconds", str(RUN_AUDIT_S)]
        words = playing if self._plays else loading
        key = key_of(words, open_variables(os.environ))
        if passed := self.remembered.recall(key):
            self.num_remembered += 1
            _pass_on(passed.lines, f"environment {name}: ")
            return "", passed.lines
        async with self._places, _read_files() as read_files:
            with told_when_slow(f"environment {name} is checked, each call within {timeout_s:g} s"):
                checked = await run_check(
                    [*words, "--read-files", str(read_files)],
                    timeout_s=timeout_s,
                    variables=self._variables,
                )
                if checked.code == 0:
                    files = json.loads(read_files.read_bytes())
                    self.remembered.add(key, checked.lines, files)
                if checked.code != 0 and self._plays and self._config.run.audit == "tell":
                    # Faults of an environment's plays are told; one that cannot be loaded would
                    # end every worker of the run.
                    checked = await _told(checked, loading, timeout_s=timeout_s)
        _pass_on(checked.lines, f"environment {name}: ")
        if checked.code == 0:
            return "", checked.lines
        prefix = f"environment {section.reference}: "
        return checked.lines[-1].removeprefix(prefix), checked.lines


@contextlib.asynccontextmanager
async def _read_files() -> AsyncIterator[Path]:
    """Yields the path of a file in which a check notes what it reads."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "read.json"


async def run_check(
    command: Sequence[str],
    *,
    timeout_s: float,
    played_s: float = 0.0,
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """Runs an environment's check, which makes several calls; its last line says why it failed.

    `variables` are further ones for it.
    """
    limit_s = CHECKED_CALLS * timeout_s + WORKER_GRACE_S + played_s
    # A rollout server's workers get the same variables.
    environ = {**open_variables(os.environ), **(variables or {})}
    ended = await run_program(command, limit_s=limit_s, environ=environ)
    if ended.code is None:
        late = f"its check did not end within {limit_s:g} s, {timeout_s:g} s for each call"
        return replace(ended, lines=(*ended.lines, late))
    if not (ended.output or (ended.lines and ended.code == USAGE_ERROR)):
        # A library or the environment itself has ended the process.
        how = f"ended itself with exit code {ended.code}"
        if ended.code < 0:
            how = f"was ended by {signal.Signals(-ended.code).name}"
        name = command[command.index("--check") + 1]
        says = f"environment {name}: its process {how} in the middle of its check"
        return replace(ended, code=ended.code or USAGE_ERROR, lines=(*ended.lines, says))
    return ended


async def _told(checked: Ended, loading: Sequence[str], *, timeout_s: float) -> Ended:
    """Returns a failed check as one that only warns, if the environment can be loaded."""
    loaded = await run_check(loading, timeout_s=timeout_s)
    if loaded.code != 0:
        return loaded
    *printed, cause = checked.lines
    warning = WARNING + cause.removeprefix(f"environment {loading[loading.index('--check') + 1]}: ")
    return replace(checked, code=0, lines=(*printed, warning))


def check_python(environment: str, python: Path | None) -> None:
    """Raises ConfigError if the interpreter of an environment is not there."""
    if python is not None and shutil.which(path := Path.cwd() / python) is None:
        what = "python must be the path of an interpreter"
        raise ConfigError(f"environment {environment}: {what}, got {python}: {path} cannot be run")


def audit_command(section: PlayedSection, config: Config) -> list[str]:
    """Returns the command that audits an environment with the limits of a run."""
    command = [*worker_program(str(section.python or "")), "--check", section.reference]
    command += ["--args", json.dumps(section.args), "--search-path", os.getcwd()]
    command += ["--timeout-s", str(section.timeout_s)]
    measured = section.num_episodes if isinstance(section, EvaluationSection) else 0
    workers = section.num_workers * config.rollout_server.count
    limits = limits_of(config, num_workers=workers, measured=measured)
    command += ["--limits", json.dumps(vars(limits))]
    return command + ["--tell"] * (config.run.audit == "tell")


def limits_of(config: Config, *, num_workers: int, measured: int = 0) -> EpisodeLimits:
    """Returns what the audit of an environment goes by that `num_workers` of all servers play.

    `measured` is the number of an evaluation's episodes, or 0 for an environment that is trained.
    """
    sampling = config.sampling
    server = config.rollout_server
    algorithm = config.algorithm
    largest_group = group_sizes_of(config).largest
    of_step = algorithm.groups_per_step * largest_group
    return EpisodeLimits(
        has_tools=server.tool_parser is not None,
        max_images=sampling.max_images,
        max_turns=sampling.max_turns or MAX_TURNS,
        max_reply_tokens=sampling.max_reply_tokens,
        at_once=math.ceil(server.max_episodes * server.count / num_workers),
        in_all=server.max_episodes * server.count,
        num_episodes=math.ceil((measured or of_step) / num_workers),
        compares=not measured and largest_group > 1,
    )


def _keep_printed(config: Config, lines: Sequence[str]) -> Path:
    make_run_folder(config)
    path = log_path(config.run_dir, "preflight")
    make_folder(path.parent)
    try:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    return path


@contextlib.contextmanager
def told_when_slow(what: str) -> Iterator[None]:
    """Prints `what` once the block has lasted longer than `SLOW_S`, and again every `AGAIN_S`."""

    async def tell() -> None:
        await asyncio.sleep(SLOW_S)
        while True:
            say(what)
            await asyncio.sleep(AGAIN_S)

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()


@dataclass(frozen=True)
class Ended:
    """The end of a program: exit code, stdout, and the last `TAIL_BYTES` of stderr in lines."""

    # The exit code, or None if the program did not end within its limit.
    code: int | None
    lines: tuple[str, ...]
    # The text that it wrote to stdout.
    output: str = ""


async def run_program(
    command: Sequence[str],
    *,
    limit_s: float,
    given: bytes = b"",
    environ: Mapping[str, str] | None = None,
) -> Ended:
    """Runs `command` with `given` on its stdin; kills it and its children after `limit_s`."""
    # Files instead of pipes: a pipe stays open as long as any process that the program has started.
    file = tempfile.TemporaryFile
    with file() as stdin, file() as stdout, file() as stderr:
        stdin.write(given)
        stdin.seek(0)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "slipstream.core.machine.keeper",
            "--",
            *command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environ,
            start_new_session=True,
        )
        try:
            code = process.returncode if await within(limit_s, process.wait()) else None
        finally:
            # The keeper ends all that the program has started.
            send_signal(process, signal.SIGTERM)
            await process.wait()
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - TAIL_BYTES))
        text = stderr.read().decode(errors="replace")
        stdout.seek(0)
        return Ended(code, tuple(text.strip().splitlines()), stdout.read().decode(errors="replace"))
