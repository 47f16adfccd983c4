"""Kills, stops and disconnects the processes of a run: `python -m support.rigs.chaos CONFIG.toml`.

The program, with `tests` on PYTHONPATH, starts `slipstream run` as a user does, and again whenever
it ends early, which resumes the run. After the last fault it stops the run normally. Then it checks
the run's
files and prints one line of JSON.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from slipstream.client.terminal import say
from slipstream.client.verify import examine
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.core.machine.address import address_parts
from slipstream.core.machine.process import become_reaper, below_this
from slipstream.core.run_folder import JOURNAL, LOGS, journal_logs
from slipstream.core.settings.config import Config

CLI = (sys.executable, "-m", "slipstream.client.cli")
# Moments of a fault: any time, or right after a journal record of this kind.
POINTS = ("any", "any", "any", "start", "lease", "end", "batch", "step", "checkpoint")
# Probabilities that a process is stopped instead of killed, and that the proxy injects the fault.
STOPPED = 0.2
CUT = 0.15
# Probability that a fault does not wait for a step after the fault before.
AT_ONCE = 0.2
MAX_STOP_S = 12.0
# Seconds without a step after which the run counts as hung.
HANGS_S = 600.0
# Seconds to wait for the record that is a fault's moment, and before a command is restarted.
POINT_S = 20.0
AGAIN_S = 1.0
# Text in a process's command line -> its role; the first text that is there counts.
_PARTS = {
    "slipstream.learner.controller": "controller",
    "slipstream.learner.trainer": "rank",
    "slipstream.core.machine.keeper": "keeper",
    "slipstream.client.worker": "worker",
    "slipstream.extensions.tinker.front": "front",
    "slipstream.rollout_server": "server",
    "VLLM": "engine",
}
ROLES = ("command", *dict.fromkeys(_PARTS.values()))
# Seconds within which the kernel shows the effect of a signal.
EFFECT_S = 10.0
_LOOK_S = 0.01
_CHUNK = 1 << 16


def process_table(command: int) -> dict[str, list[psutil.Process]]:
    """Returns the process `command` (a pid) and its descendants, by their role in the run."""
    processes: dict[str, list[psutil.Process]] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(command)
        processes["command"] = [root]
        for process in root.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                line = " ".join(process.cmdline())
                role = next(
                    (role for mark, role in _PARTS.items() if mark in line), None
                )
                # Between fork and exec a process still has the command line of its parent.
                if role is not None and "slipstream.core.machine.process" not in line:
                    processes.setdefault(role, []).append(process)
    return processes


async def stop(process: psutil.Process, for_s: float) -> bool:
    """Stops a process for `for_s`, then continues it; returns False if it could not be stopped."""
    try:
        if not await _shows(process, signal.SIGSTOP, psutil.STATUS_STOPPED):
            return False
        await asyncio.sleep(for_s)
        return True
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


async def _shows(process: psutil.Process, number: signal.Signals, effect: str) -> bool:
    """Sends a signal; returns whether the process takes the status `effect` within `EFFECT_S`.

    A process that is gone counts as a zombie, unless it was gone before the signal.
    """
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    until_s = time.monotonic() + EFFECT_S
    while process.is_running() and time.monotonic() < until_s:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == effect:
                return True
        await asyncio.sleep(_LOOK_S)
    return effect == psutil.STATUS_ZOMBIE and not process.is_running()


class Proxy:
    """Carries TCP connections from a free port of loopback to `target`, and injects faults."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        # Seconds by which each piece is late; while `_open` is not set, nothing is carried.
        self._late_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._refuses = False

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._break()

    @property
    def address(self) -> str:
        """The address, host:port, at which the proxy listens."""
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def cut(self, for_s: float) -> bool:
        """Breaks all connections and refuses new ones for `for_s`; returns whether any existed."""
        self._refuses = True
        broken = self._break()
        await asyncio.sleep(for_s)
        self._refuses = False
        return broken > 0

    async def half_open(self, for_s: float) -> bool:
        """Carries no data for `for_s`, then breaks all connections; returns whether any existed."""
        self._open.clear()
        await asyncio.sleep(for_s)
        broken = self._break()
        self._open.set()
        return broken > 0

    async def delay(self, for_s: float) -> bool:
        """Delays all data by 0.2 s for `for_s`; returns whether a connection is still open."""
        self._late_s = 0.2
        await asyncio.sleep(for_s)
        self._late_s = 0.0
        return bool(self._pairs)

    def _break(self) -> int:
        for pair in self._pairs:
            for writer in pair:
                writer.transport.abort()
        return len(self._pairs)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            if self._refuses:
                return
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            return
        finally:
            if self._refuses:
                writer.transport.abort()
        pair = (writer, far_writer)
        self._pairs.add(pair)
        try:
            ways = self._pump(reader, far_writer), self._pump(far_reader, writer)
            await asyncio.wait(
                map(asyncio.ensure_future, ways), return_when="FIRST_COMPLETED"
            )
        finally:
            self._pairs.discard(pair)
            for process in pair:
                process.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._open.wait()
                await asyncio.sleep(self._late_s)
                writer.write(data)
                await writer.drain()


@dataclass
class Tally:
    """Counts the faults injected into a run, and records its step and recovery times."""

    fired: Counter[str] = field(default_factory=Counter)
    commands: int = 0
    # Seconds from a fault to the next step, by role; time.monotonic of each step.
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    steps_s: list[float] = field(default_factory=list)

    @property
    def effective_time(self) -> float:
        """Fraction of the run's time that its steps would have taken without faults.

        This is the median step time times the number of steps, divided by the time from the first
        to the last step. It is 0 if the run has fewer than two steps.
        """
        pauses = [after - before for before, after in itertools.pairwise(self.steps_s)]
        return (
            round(statistics.median(pauses) * len(pauses) / sum(pauses), 3)
            if pauses
            else 0.0
        )


async def run_chaos(
    path: Path,
    overrides: Sequence[str],
    *,
    kills: int,
    seed: int,
    every_s: float,
    roles: str,
    partitions: bool,
    command: Sequence[str] = CLI,
) -> int:
    """Runs the settings in `path` under `kills` faults, checks the run, prints one line of JSON.

    Returns 0 if the run ended normally, all faults fired, the files show no fault of the run and
    its replay is equal; otherwise 1. Raises ConfigError for arguments that cannot work, and
    RunFailed if the run does not begin or makes no more steps. `command` is the program to which
    `run`, `rollout-server` or `replay` is appended.
    """
    chosen_roles = roles.split(",") if roles else list(ROLES)
    if kills < 0 or every_s < 0 or not set(chosen_roles) <= set(ROLES):
        raise ConfigError(
            f"--kills {kills}, --every-s {every_s:g} and --roles {roles}: no number below 0, and "
            f"roles of {','.join(ROLES)}"
        )
    config = load_config(path, overrides)
    if journal_logs(config.run_dir / JOURNAL):
        raise ConfigError(
            f"{config.run_dir} holds a run already; choose another run.name"
        )
    # Processes that a killed command leaves become children of this process.
    become_reaper()
    began_s = time.monotonic()
    chaos = Chaos(config, command, [str(path), *overrides], random.Random(seed))
    code = await chaos.run(kills, every_s, chosen_roles, partitions=partitions)
    if not journal_logs(config.run_dir / JOURNAL):
        raise RunFailed(f"the run did not begin: {chaos.last_line()}")
    findings = await asyncio.to_thread(examine, config.run_dir)
    replay = await chaos.start("replay", str(config.run_dir))
    is_equal = await replay.wait() == 0
    tally = chaos.tally
    recovery = {
        role: {
            "median": round(statistics.median(all_s), 1),
            "max": round(max(all_s), 1),
        }
        for role, all_s in sorted(tally.recovery_s.items())
    }
    answer = {
        "kills": kills,
        "fired": tally.fired.total(),
        "max_lag": max(findings.lags, default=0),
        "replay_equal": is_equal,
        "exit_code": code,
        "commands": tally.commands,
        "seed": seed,
        "wall_s": round(time.monotonic() - began_s, 1),
        "steps": len(tally.steps_s),
        "effective_time": tally.effective_time,
        "recovery_s": recovery,
        "by_fault": dict(sorted(tally.fired.items())),
        "faults": len(findings.faults),
        "found": findings.faults[:10],
    }
    say(json.dumps(answer))
    return int(
        code != 0
        or bool(findings.faults)
        or not is_equal
        or tally.fired.total() < kills
    )


class Chaos:
    """Restarts a run's command until the run is over, and injects faults into its processes."""

    # The command that is a whole run, and when and how soon faults come.
    program = "run"
    points = POINTS
    at_once = AT_ONCE

    def __init__(
        self,
        config: Config,
        command: Sequence[str],
        settings: Sequence[str],
        rng: random.Random,
    ) -> None:
        self._config = config
        self._command = command
        self._settings = settings
        self._random = rng
        self._log = config.run_dir / LOGS / "chaos.log"
        # Number of journal records of each kind so far.
        self._records = Counter[str]()
        # The command while it lives, whether a fault may have hit it, and whether it must stop.
        self._live: asyncio.subprocess.Process | None = None
        self._is_harmed = False
        self._is_over = False
        self.tally = Tally()

    async def run(
        self, kills: int, every_s: float, roles: Sequence[str], *, partitions: bool
    ) -> int:
        """Keeps the run going under `kills` faults; returns the exit code of its last command.

        The code of a command that this method stops is 0. Pauses between faults last `every_s` on
        average; most faults also wait for a step after the fault before. Faults hit processes of
        `roles`, and with `partitions` also the connection of an additional rollout server. Raises
        RunFailed if no step comes within `HANGS_S`.
        """
        address = address_parts(self._config.controller.address)
        async with contextlib.AsyncExitStack() as stack:
            proxy = (
                await stack.enter_async_context(Proxy(address)) if partitions else None
            )
            running = asyncio.ensure_future(self._keep_run())
            harming = asyncio.ensure_future(self._harm(kills, every_s, roles, proxy))
            following = asyncio.ensure_future(self._follow())
            beside = map(asyncio.ensure_future, self._beside())
            tasks: list[asyncio.Task[Any]] = [running, harming, following, *beside]
            if proxy is not None:
                tasks.append(asyncio.ensure_future(self._keep_server(proxy)))
            try:
                await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
                for task in tasks[1:]:
                    if task.done():
                        await task
                code = await running
                if following.done():
                    # Following the journal failed: steps are missing from the effective time.
                    await following
                return 0 if code == 128 + signal.SIGINT else code
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        """Starts the command with `arguments`; appends its output to chaos.log.

        The command ends with this process at the latest.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *below_this(),
                *self._command,
                *arguments,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def last_line(self) -> str:
        """Returns the last line of chaos.log."""
        return self._log.read_text(errors="replace").rstrip().rpartition("\n")[2]

    async def _keep_run(self) -> int:
        while True:
            process = await self.start(self.program, *self._settings)
            self._live = process
            self._is_harmed = False
            self.tally.commands += 1
            code = await _end_of(process)
            self._live = None
            # A fault during the checks before the start ends the command like an invalid setting.
            is_refused = code == 2 and not self._is_harmed
            if code == 0 or is_refused or self._is_over:
                return code
            await asyncio.sleep(AGAIN_S)

    async def _keep_server(self, proxy: Proxy) -> None:
        """Keeps one more rollout server running, which reaches the controller through the proxy."""
        while True:
            name = ("--server-id", "cut-off", "--controller", proxy.address)
            await _end_of(await self.start("rollout-server", *self._settings, *name))
            await asyncio.sleep(AGAIN_S)

    async def _harm(
        self, kills: int, every_s: float, roles: Sequence[str], proxy: Proxy | None
    ) -> None:
        """Injects `kills` faults, most of them after a new step; then asks the run to stop."""
        role = ""
        at_s = 0.0
        while True:
            is_last = self.tally.fired.total() == kills
            if (
                is_last
                or not self.tally.steps_s
                or self._random.random() >= self.at_once
            ):
                await self._until("step", HANGS_S, must=True)
                if role:
                    took_s = time.monotonic() - at_s
                    self.tally.recovery_s.setdefault(role, []).append(took_s)
                role = ""
            if is_last:
                await self._end()
                return
            await asyncio.sleep(self._random.uniform(0.0, 2 * every_s))
            point = self._random.choice(self.points)
            if point != "any":
                await self._until(point, POINT_S)
            at_s = time.monotonic()
            self._is_harmed = True
            fault = await self._fault(roles, proxy)
            if fault:
                role = fault.partition(" ")[2]
                self.tally.fired[fault] += 1
                with self._log.open("a") as log:
                    log.write(f"{time.time():.3f} {fault}, at: {point}\n")

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        """Returns what goes on while the run does."""
        return []

    async def _end(self) -> None:
        """Ends the run."""
        # The step that was seen may be one of a command that the last fault ended.
        command = None
        while command is None or command is not self._live:
            command = self._live
            await self._until("step", HANGS_S, must=True)
        self._is_over = True
        command.send_signal(signal.SIGINT)

    async def _fault(self, roles: Sequence[str], proxy: Proxy | None) -> str:
        """Injects one fault; returns its name, or "" if no process or connection was affected."""
        rng = self._random
        if proxy is not None and rng.random() < CUT:
            how = rng.choice(("cut", "half_open", "delay"))
            for_s = rng.uniform(0.5, 1.5 * self._config.controller.heartbeat_timeout_s)
            return f"{how} server" if await getattr(proxy, how)(for_s) else ""
        if (command := self._live) is None:
            return ""
        by_role = process_table(command.pid)
        present = [role for role in roles if role in by_role]
        if not present:
            return ""
        role = rng.choice(present)
        victim = rng.choice(by_role[role])
        if rng.random() < STOPPED and role != "command":
            for_s = rng.uniform(0.5, MAX_STOP_S)
            return f"stop {role}" if await stop(victim, for_s) else ""
        is_dead = await _shows(victim, signal.SIGKILL, psutil.STATUS_ZOMBIE)
        if is_dead and role == "command":
            await command.wait()
        return f"kill {role}" if is_dead else ""

    async def _until(self, kind: str, limit_s: float, *, must: bool = False) -> None:
        """Waits up to `limit_s` for a new journal record of `kind`.

        Raises RunFailed if no such record comes and `must` is true.
        """
        until_s = time.monotonic() + limit_s
        before = self._records[kind]
        while time.monotonic() < until_s:
            if self._records[kind] > before:
                return
            await asyncio.sleep(_LOOK_S)
        if must:
            raise RunFailed(f"no step within {limit_s:g} s; the log is {self._log}")

    async def _follow(self) -> None:
        """Counts new journal records and notes when each step came, also during a fault."""
        read = Counter[Path]()
        while True:
            kinds = []
            for path in journal_logs(self._config.run_dir / JOURNAL)[-2:]:
                with path.open("rb") as log:
                    log.seek(read[path])
                    complete_lines, newline, _ = log.read().rpartition(b"\n")
                read[path] += len(complete_lines + newline)
                kinds += [
                    json.loads(line[9:])["kind"] for line in complete_lines.splitlines()
                ]
            self.tally.steps_s += [time.monotonic()] * kinds.count("step")
            self._records.update(kinds)
            await asyncio.sleep(_LOOK_S)


async def _end_of(process: asyncio.subprocess.Process) -> int:
    """Waits for the end of a command and returns its exit code; kills it if cancelled."""
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()


def main(command: Sequence[str] = CLI) -> int:
    """Does to the run of the arguments what they say; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, metavar="CONFIG.toml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--kills", type=int, default=20, help="the number of faults")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument(
        "--every-s", type=float, default=5.0, help="mean pause behind a step"
    )
    parser.add_argument(
        "--roles", default="", metavar="ROLE,...", help=f"of {','.join(ROLES)}"
    )
    parser.add_argument(
        "--partitions",
        action="store_true",
        help="one more server, which is cut off at times",
    )
    options = parser.parse_args()
    return asyncio.run(run_chaos(**vars(options), command=command))


if __name__ == "__main__":
    sys.exit(main())
