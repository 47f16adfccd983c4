"""Runs one environment for a rollout server, as a worker process.

    python -m slipstream.client.worker --connect unix:PATH
    python -m slipstream.client.worker --forks DESCRIPTOR
    python -m slipstream.client.worker --check package.module:Class --args '{"digits": 3}'

A check plays replies whose worth is known (`audit`); an agent's check waits for its first call.
With `--forks` the process forks a worker for each message of the server (`warm_start`).

Consumes: commands of the server. Produces: one answer for each. The worker ends when the server
closes the stream or dies.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import signal
import sys
import threading
import traceback
from base64 import b64encode
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import grpc.aio
from slipstream.client.agent_address import HostAddress
from slipstream.client.environment_loader import CallTracker, describe, running_place
from slipstream.client.episode_host import EpisodeHost, answer_commands, open_stream
from slipstream.client.read_files import ReadFiles
from slipstream.core.errors import WARNING
from slipstream.core.machine.files import remove_abandoned
from slipstream.core.machine.process import die_with_parent, send_signal
from slipstream.core.machine.warm_start import become_worker
from slipstream.core.waits import within
from slipstream.protocol.access.security import Credentials, call_metadata, open_channel
from slipstream.v1 import environment_pb2 as pb
from slipstream.v1 import environment_pb2_grpc

if TYPE_CHECKING:
    from slipstream.client.audit_plays import Played
    from typing_extensions import Buffer

TOKEN_VARIABLE = "SLIPSTREAM_TOKEN"
CONNECT_TIMEOUT_S = 20.0
# Seconds after the end of its stream at which a worker exits, whatever threads are left.
EXIT_TIMEOUT_S = 5.0
_exit = os._exit


def main(argv: list[str] | None = None) -> int:
    """Runs the worker or the check; returns the exit code.

    0 means that the stream ended, 1 that no server answered or the connection was lost. A check
    ends the process itself: with 0 if it passed, with 2 if it failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.client.worker", description="Runs one environment."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--connect", metavar="ADDRESS", help="unix:PATH of the server")
    what.add_argument("--forks", type=int, metavar="FD", help="a socket that says which to start")
    what.add_argument("--check", metavar="MODULE:CLASS", help="load it and play its judge")
    parser.add_argument("--record", type=int, metavar="FD", help="where to note calls (--connect)")
    parser.add_argument("--args", default="{}", metavar="JSON", help="keyword arguments (--check)")
    parser.add_argument("--search-path", default="", metavar="DIR", help="where the module lies")
    parser.add_argument("--no-play", action="store_true", help="only load it (--check)")
    parser.add_argument("--limits", default="{}", metavar="JSON", help="of a run (--check)")
    parser.add_argument("--seconds", type=float, default=15.0, help="limit of all plays (--check)")
    parser.add_argument("--warn", action="store_true", help="what is odd, on stderr (--check)")
    parser.add_argument("--tell", action="store_true", help="refuse no reward or prompt (--check)")
    parser.add_argument("--json", action="store_true", help="a report for programs (--check)")
    parser.add_argument("--read-files", metavar="FILE", help="where to write what it reads")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="limit of a call (--check)")
    arguments = parser.parse_args(argv)
    forked = None
    if arguments.forks is not None:
        # Ctrl-C reaches the whole process group; the server says when its workers end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        forked = become_worker(arguments.forks)
        if forked is None:
            return 0
    # The environment's prints go to stderr.
    report = os.dup(1)
    sys.stdout.flush()
    os.dup2(2, 1)
    output = sys.stdout = sys.stderr = lossy_output()
    if forked is not None:
        worker, record = forked
        return _serve(worker.address, worker.token, record)
    if arguments.check is None:
        token = os.environ.pop(TOKEN_VARIABLE, None)
        return _serve(arguments.connect, token, arguments.record)
    read = ReadFiles() if arguments.read_files else None
    check = _Check(arguments, output)
    os._exit = check.told_exit
    try:
        summary = asyncio.run(check.run())
    except BaseException as error:  # noqa: BLE001 - such as one of an event loop that was stopped
        traceback.print_exc()
        check.fail(f"its check broke off: {describe(error)}")
    if read is not None:
        Path(arguments.read_files).write_text(json.dumps(read.states()), encoding="utf-8")
    with open(report, "w", encoding="utf-8", errors="backslashreplace") as file:
        print(summary, file=file)
    # Threads of the environment must not keep the process alive.
    output.flush()
    return _exit(0)


class _Output(io.TextIOWrapper):
    close = io.TextIOWrapper.flush


class _Lossy(io.FileIO):
    def write(self, data: "Buffer") -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return memoryview(data).nbytes


def lossy_output() -> io.TextIOWrapper:
    """Returns a stream to file 2 that nobody closes, and that loses what a full disk refuses."""
    file = io.BufferedWriter(_Lossy(2, "wb", closefd=False))
    return _Output(file, errors="backslashreplace", line_buffering=True)


def _serve(address: str, token: str | None, record: int | None) -> int:
    host_address = HostAddress.taken()
    die_with_parent()
    # Ctrl-C reaches the whole process group; the server says when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker that was killed has left the folders of its programs, which may be large.
    threading.Thread(target=remove_abandoned, daemon=True).start()
    code = 1
    try:
        if loss := asyncio.run(_attach(address, token, record, host_address)):
            print(f"slipstream worker: {loss}", file=sys.stderr)
        else:
            code = 0
    finally:
        timer = threading.Timer(EXIT_TIMEOUT_S, os._exit, (code,))
        timer.daemon = True
        timer.start()
    return code


async def _attach(
    address: str, token: str | None, record: int | None, host_address: HostAddress | None
) -> str:
    """Answers a server until it ends the stream; returns why there is none or it is lost, or ""."""
    credentials = Credentials(token=token)
    async with open_channel(address, credentials) as channel:
        if not await within(CONNECT_TIMEOUT_S, channel.channel_ready()):
            return f"no server answers at {address} within {CONNECT_TIMEOUT_S:g} s"
        stub = environment_pb2_grpc.WorkerServiceStub(channel)
        try:
            attach = partial(stub.Attach, metadata=call_metadata(credentials))
            call = await open_stream(attach, pb.WorkerHello())
            host = EpisodeHost(
                tracker=None if record is None else CallTracker(record),
                host_address=host_address,
            )
            await answer_commands(host, aiter(call), call.write)
        except grpc.aio.AioRpcError as error:
            return f"{address}: {error.details()}"
    return ""


class _Check:
    """Audits an environment; ends the process when it cannot be used."""

    def __init__(self, options: argparse.Namespace, output: io.TextIOWrapper) -> None:
        self._options = options
        self._output = output
        self._host = EpisodeHost(host_address=HostAddress.taken())
        self._main_thread, self._process = threading.get_ident(), os.getpid()
        self._other: asyncio.subprocess.Process | None = None

    async def run(self) -> str:
        options = self._options
        spec = {"reference": options.check, "args_json": options.args}
        loading = await self._call(load={"spec": spec | {"search_path": options.search_path}})
        if loading.HasField("failure"):
            self.fail(loading.failure.message)
        if options.no_play:
            return f"environment {options.check} is loaded: {loading.loaded.digest}"
        from slipstream.client.audit import Audit
        from slipstream.client.audit_plays import EpisodeLimits

        loaded = loading.loaded
        limits = EpisodeLimits(**json.loads(options.limits))
        audit = Audit(self._host, self._call, loaded=loaded, limit_s=options.seconds, limits=limits)
        # Without a fixed seed sets have another order in each process, as in no run.
        if not options.warn and "PYTHONHASHSEED" in os.environ:
            # The other process loads the environment too, and says the digest of its tasks.
            self._other = await asyncio.create_subprocess_exec(
                *sys.orig_argv,
                "--no-play",
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        played = await audit.run()
        if played.first_call and limits.max_turns == 1:
            second = "with sampling.max_turns = 1 an agent's second call is refused (400)"
            print(f"{WARNING}{second}", file=sys.stderr)
        if self._other is not None:
            other_output, _ = await self._other.communicate()
            if other_output.decode().rpartition(": ")[2].strip() not in ("", loaded.digest):
                played.other_tasks.append("in another process")
        return self._report(played)

    def _report(self, played: "Played") -> str:
        """Returns what the audit tells, as text or JSON; ends the check for a refused finding."""
        from slipstream.client.audit_data import key_of
        from slipstream.client.audit_report import findings, headline, slowness, table

        options = self._options
        slow = slowness(played, limit_s=options.timeout_s)
        all_findings = [*findings(played), *slow]
        refused = [
            finding.text for finding in all_findings if finding.is_refused and not options.tell
        ]
        if refused and not options.json:
            self.fail(refused[0])
        remarks = [finding.text for finding in all_findings if finding.text not in refused]
        for finding in all_findings if options.warn else ():
            if finding.text in remarks:
                # Plays without time are in the log alone; `slipstream check` has time for more.
                print(f"{'' if finding.is_of_time else WARNING}{finding.text}", file=sys.stderr)
        lines = [headline(played), *table(played), *(f"! {line}" for line in remarks)]
        if not options.json:
            return "\n".join([f"environment {options.check} is ready: {lines[0]}", *lines[1:]])
        # Tasks of an agent have no messages: its calls do.
        tasks = [] if played.first_call else played.tasks
        openings = [task.opening.SerializeToString() for task in tasks]
        questions = [(key_of(row.text), key_of(row.right)) for row in played.rows]
        shown = {"lines": lines, "refused": refused, "seconds": played.seconds, "asked": questions}
        return json.dumps(
            shown | {"openings": [b64encode(opening).decode() for opening in openings]}
        )

    async def _call(self, **command: Any) -> pb.WorkerMessage:  # noqa: ANN401 - fields of messages
        timer = threading.Timer(self._options.timeout_s, self._abandon, (command,))
        timer.daemon = True
        timer.start()
        answer = await self._host.answer(pb.WorkerCommand(**command))
        timer.cancel()
        return answer

    def _abandon(self, command: dict[str, dict[str, str]]) -> NoReturn:
        place = running_place(self._main_thread)
        innermost = sys._current_frames()[self._main_thread].f_code.co_filename
        if Path(innermost).name == "selectors.py":
            (fields,) = command.values()
            key = fields.get("episode_key", "")
            place = self._host.place(key) or "it awaits something that does not come"
        self.fail(f"no answer within {self._options.timeout_s:g} s ({place})")

    def told_exit(self, status: int) -> NoReturn:
        """Takes the place of `os._exit` for the environment, whose forks may end without a word."""
        if os.getpid() == self._process:
            place = running_place(threading.get_ident())
            self.fail(f"it has ended its process by os._exit({status}) ({place})")
        _exit(status)

    def fail(self, cause: str) -> NoReturn:
        # The cause is the last line of stderr, after all that the environment has printed.
        self._output.flush()
        if self._other is not None:
            send_signal(self._other, signal.SIGKILL)
        line = f"environment {self._options.check}: {cause}\n"
        os.write(2, line.encode(errors="backslashreplace"))
        _exit(2)


if __name__ == "__main__":
    sys.exit(main())
