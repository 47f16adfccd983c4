"""Starts the processes of a command: each has its own log file, none outlives the command.

Waits for: the ends of the processes, or a signal of the user. Unblocked by: such an end or signal;
`stop` ends a process, by force after its grace time.
"""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.client.terminal import say
from slipstream.core.errors import FINAL_ERROR, NOT_STARTED, USAGE_ERROR, ConfigError, RunFailed
from slipstream.core.logs import as_text, writer_command
from slipstream.core.machine.address import address_parts, free_port
from slipstream.core.machine.gpu_memory import without_processes
from slipstream.core.machine.process import below_this, kernel_oom_kills
from slipstream.core.run_folder import log_path
from slipstream.core.settings.config import Config
from slipstream.core.waits import within
from slipstream.protocol.access.exposure import RENDEZVOUS_VARIABLE, rendezvous_secret
from slipstream.protocol.access.run_token import run_credentials

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
# A restart after one of these would fail in the same way.
FINAL_CODES = (USAGE_ERROR, FINAL_ERROR)
# Failed starts in a row, in which the program did not begin to work, that end the restarts.
MAX_FAILED_STARTS = 2
TAIL_BYTES = 65536
# A disk with fewer free bytes counts as full.
FULL_BYTES = 1 << 20
# Seconds in which a log's writer has written all that an ended process has said.
LOG_END_S = 5.0
# Seconds between two looks at a log for new lines.
LOOK_S = 0.2
# A scheduler sends SIGTERM to a job, to its steps and to their processes: all mean one request.
SAME_ORDER_S = 5.0
OUR_PREFIXES = ("slipstream: ", "rollout server: ")
# Lines of a traceback that name no cause.
NO_CAUSE = re.compile(
    r'(\[rank\d+\]:\s*)?([\s^~]*$|File "|frame #\d|Exception raised from |<omitting python)'
)
# The word before the cause with which a C++ program ends.
WHAT = "what():"
# vLLM's hint at a cause above, which is missing when a signal has ended the process.
SEE_ABOVE = "See root cause above"
EXCEPTION = re.compile(r"[\w.]+(Error|Exception): ")
TRACEBACK = "Traceback (most recent call last):"
# A line of a log that is newer than a traceback above it.
NEW_ERROR = re.compile(r"\S.* (ERROR|CRITICAL) ")
# The remedy, which is put before torch's long message.
_LESS_MEMORY = (
    "the GPU's memory is full: lower learner.micro_batch_tokens, or what engines on that GPU take "
    "(rollout_server.gpu_memory_utilization), or end other programs there, or spread the model "
    "(learner.parallel)"
)


@dataclass(eq=False)
class Child:
    """A program that this command has started, and its log."""

    name: str
    process: asyncio.subprocess.Process
    log_path: Path
    # The place in the log where this process's part begins: an earlier one may have written.
    log_start: int = 0
    # The log's inode then: a log that has grown too large is moved, and a new one begins.
    log_inode: int = 0
    # Ends with the program that writes the log; None where the process writes it itself.
    log_end: threading.Thread | None = None
    # The kernel's count, at the start, of processes that it ended because memory was full.
    oom_kills: int = 0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None

    @property
    def was_killed(self) -> bool:
        return (self.process.returncode or 0) < 0

    def describe_end(self) -> str:
        """Returns how the program ended, its log's last cause, and whether the disk is full."""
        code = self.process.returncode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        # A program that gets SIGKILL cannot write why.
        is_mute = code == -signal.SIGKILL
        cause = "" if is_mute else self._last_complaint()
        if (is_mute or SEE_ABOVE in cause) and kernel_oom_kills() > self.oom_kills:
            cause = "memory was full, so the kernel ended a process; give the run more memory"
        elif SEE_ABOVE in cause:
            cause = "vLLM's engine ended at its start: by an error above in the log, or by a signal"
        elif "CUDA out of memory" in cause:
            cause = f"{_LESS_MEMORY}: {without_processes(cause)}"
        ending = f"{self.name} {how}" + (f": {cause}" if cause else "") + f" (log: {self.log_path})"
        return with_full_disk(ending, self.log_path.parent)

    def _last_complaint(self) -> str:
        if self.log_end is not None:
            self.log_end.join(LOG_END_S)
        with contextlib.suppress(OSError):
            if self.log_path.stat().st_ino != self.log_inode:
                return last_complaint(self.log_path)
        return last_complaint(self.log_path, self.log_start)

    def failure(self) -> ConfigError | RunFailed:
        """Returns the error that says how the program ended, ConfigError if it refused to run."""
        error = ConfigError if self.process.returncode == USAGE_ERROR else RunFailed
        return error(self.describe_end())

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the program's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def stop(self, grace_s: float) -> None:
        """Asks the program to end; after `grace_s` kills it and the rest of its group."""
        if self.is_running:
            self.signal(signal.SIGTERM)
            # A process that SIGSTOP has stopped handles SIGTERM only after SIGCONT.
            self.signal(signal.SIGCONT)
            await within(grace_s, self.process.wait())
        self.signal(signal.SIGKILL)
        await self.process.wait()
        if self.log_end is not None:
            await asyncio.to_thread(self.log_end.join, LOG_END_S)


async def start_child(
    name: str,
    module: str,
    arguments: Sequence[str],
    *,
    log_path: Path,
    environ: Mapping[str, str] = {},
    log_writer: Sequence[str] = (),
) -> Child:
    """Starts `python -m module arguments` in a process group of its own.

    The output is appended to `log_path`, by the program `log_writer` if there is one, and `environ`
    is added to the environment variables. Raises ConfigError when the log cannot be written.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        opened = log_path.open("ab")
    except OSError as error:
        raise ConfigError(f"{log_path} cannot be written: {error.strerror}") from error
    with opened as log:
        log_start = log.tell()
        log_inode = os.fstat(log.fileno()).st_ino
        log_end, output = _start_writer(log_writer, log.fileno())
        try:
            process = await asyncio.create_subprocess_exec(
                *below_this(),
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        finally:
            # The process alone keeps it open, so the writer ends with the process.
            if log_end is not None:
                os.close(output)
    return Child(name, process, log_path, log_start, log_inode, log_end, kernel_oom_kills())


async def start_in_run(
    config: Config,
    name: str,
    module: str,
    arguments: Sequence[str],
    environ: Mapping[str, str] = {},
    *,
    log: Path | None = None,
) -> Child:
    """Starts a program of a run, whose log has the form and the size of the run's settings.

    Without `log` it lies in the run's folder.
    """
    path = log or log_path(config.run_dir, name)
    writer = writer_command(config, name, path)
    return await start_child(
        name, module, arguments, log_path=path, environ=environ, log_writer=writer
    )


def _start_writer(command: Sequence[str], log: int) -> tuple[threading.Thread | None, int]:
    """Starts a program that writes a log; returns what ends with it, and the descriptor it reads.

    Without a command the descriptor is that of the log. The program outlives this process until
    all that write to it have ended.
    """
    if not command:
        return None, log
    source, output = os.pipe()
    try:
        writer = subprocess.Popen(
            command, stdin=source, stdout=log, stderr=log, start_new_session=True
        )
    finally:
        os.close(source)
    log_end = threading.Thread(target=writer.wait, name=f"log writer {writer.pid}", daemon=True)
    log_end.start()
    return log_end, output


async def first_failed(children: Sequence[Child], *, fine: Sequence[int]) -> Child | None:
    """Returns the first child that ends with a code not in `fine`, at once, or None without one."""
    waits = {asyncio.ensure_future(child.process.wait()): child for child in children}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            ended = [waits.pop(wait) for wait in done]
            failed = [child for child in ended if child.process.returncode not in fine]
            # A child that was killed goes first: the others only say that they lost it. Next comes
            # one that knows that it would fail again.
            failed.sort(key=lambda c: (not c.was_killed, c.process.returncode not in FINAL_CODES))
            if failed:
                return failed[0]
        return None
    finally:
        for wait in waits:
            wait.cancel()


def with_full_disk(cause: str, folder: Path) -> str:
    """Returns `cause`, with a hint if the disk of `folder` is full, since logs may be cut off."""
    hint = f"no space is left on the disk of {folder}"
    try:
        if hint in cause or shutil.disk_usage(folder).free >= FULL_BYTES:
            return cause
    except OSError:
        return cause
    return f"{cause}; {hint}"


async def show_lines(path: Path, prefix: str, ended: asyncio.Event) -> None:
    """Prints the lines of a growing log that begin with `prefix`, until `ended` is set."""
    position = 0
    while True:
        is_last = ended.is_set()
        with path.open("rb") as log:
            log.seek(position)
            complete, newline, _ = log.read().rpartition(b"\n")
        position += len(complete) + len(newline)
        for line in complete.decode(errors="replace").splitlines():
            if line.startswith(prefix):
                say(line)
        if is_last:
            return
        await within(LOOK_S, ended.wait())


def last_complaint(path: Path, start: int = 0) -> str:
    """Returns the line of a log that most likely names the cause of a failure, or "" without one.

    Only lines from byte `start` on count, unless the log was cut meanwhile. A line that our
    programs wrote for people is preferred, then the exception of the last traceback, then the last
    line.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start if start <= end else 0, end - TAIL_BYTES))
            written = file.read().decode(errors="replace")
    except OSError:
        return ""
    text = "\n".join(as_text(line) for line in written.splitlines())
    # The traceback of an exception group draws a frame with these characters.
    lines = [line.strip().lstrip("|+- ") for line in text.splitlines()]
    spoken = [line for line in lines if line.startswith(OUR_PREFIXES)]
    candidates = spoken or [
        line for line in lines if " INFO " not in line and not NO_CAUSE.match(line)
    ]
    complaint = candidates[-1] if candidates else ""
    thrown = [line.removeprefix(WHAT).lstrip() for line in candidates if line.startswith(WHAT)]
    complaint = thrown[-1] if thrown else complaint
    if not spoken:
        complaint = _last_exception(text.splitlines()) or complaint
    if SEE_ABOVE in complaint:
        causes = [line for line in candidates if EXCEPTION.match(line) and SEE_ABOVE not in line]
        complaint = causes[-1] if causes else complaint
    for prefix in OUR_PREFIXES:
        complaint = complaint.removeprefix(prefix)
    return complaint


def _last_exception(lines: Sequence[str]) -> str:
    """Returns the exception of the last traceback, "" without one or with an error after it."""
    begins = [number for number, line in enumerate(lines) if TRACEBACK in line]
    if not begins:
        return ""
    # The text that a logger or torchrun puts before each line of the traceback.
    prefix = lines[begins[-1]].partition(TRACEBACK)[0].removesuffix("Exception Group ")
    below = [line.removeprefix(prefix) for line in lines[begins[-1] + 1 :]]
    ends = [number for number, line in enumerate(below) if line[:1].strip(" |+-")]
    # Further lines of that exception say less; an error after it may be the cause.
    if not ends or any(NEW_ERROR.match(line) for line in below[ends[0] + 1 :]):
        return ""
    return below[ends[0]].strip()


class RestartPolicy:
    """Counts the deaths of one program, and gives the pause before each restart.

    Two starts are at least 1, 2, 4, ... seconds apart, so a program that ran for long starts again
    at once.
    """

    def __init__(self, max_restarts: int, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        """Allows `max_restarts` restarts between two calls of `forgive`."""
        self._max_restarts = max_restarts
        self._first_pause_s = first_pause_s
        # The number of the restart that is due, or was made last.
        self.restarts = 0
        self._failed_starts = 0

    def forgive(self) -> None:
        """Counts restarts from 0 again; called when the program ran for long or made progress."""
        self.restarts = 0

    def pause_after(self, exit_code: int | None, *, age_s: float = 0.0) -> float | None:
        """Returns seconds until the next start of what ran for `age_s`, or None if it is final."""
        self.restarts += 1
        self._failed_starts = self._failed_starts + 1 if exit_code == NOT_STARTED else 0
        is_final = exit_code in FINAL_CODES
        is_final |= self._failed_starts == MAX_FAILED_STARTS
        if is_final or self.restarts > self._max_restarts:
            return None
        return max(0.0, min(self._first_pause_s * 2.0 ** (self.restarts - 1), MAX_PAUSE_S) - age_s)


async def stop_signal() -> signal.Signals:
    """Waits for the first SIGINT, SIGTERM or SIGHUP and returns it.

    After that, SIGINT and SIGTERM have their usual effect, but a SIGTERM within `SAME_ORDER_S` has
    none. A second SIGHUP has none either: a terminal that closes and its shell both send one. A
    SIGHUP that the process ignored before, as under nohup, stays ignored.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        loop.remove_signal_handler(signal.SIGINT)
        if not came.done():
            came.set_result(number)
            loop.call_later(SAME_ORDER_S, loop.remove_signal_handler, signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, note, number)
    return await came


def rank_environments(config: Config, ranks: range) -> list[dict[str, str]]:
    """Returns the environment variables of each rank: torchrun's and the rendezvous secret."""
    learner = config.learner
    host, port = address_parts(learner.master)
    # Random where one node has all ranks, equal on all nodes otherwise.
    secret = secrets.token_hex(16)
    if len(ranks) < learner.world_size:
        secret = rendezvous_secret(run_credentials(config).token, config.run.name)
    shared = {
        "WORLD_SIZE": str(learner.world_size),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port or free_port(host)),
        RENDEZVOUS_VARIABLE: secret,
    }
    if learner.threads:
        shared["OMP_NUM_THREADS"] = str(learner.threads)
    return [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        for local_rank, rank in enumerate(ranks)
    ]
