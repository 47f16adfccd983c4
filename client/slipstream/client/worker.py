"""Runs one environment for a rollout server, as a worker process.

    python -m slipstream.client.worker --connect unix:PATH
    python -m slipstream.client.worker --check package.module:Class --args '{"digits": 3}'

A check plays the first step of the first task; an agent's check waits for its first call.

Consumes: commands of the server. Produces: one answer for each. The worker ends when the server
closes the stream or dies.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from slipstream.v1 import environment_pb2 as pb

TOKEN_VARIABLE = "SLIPSTREAM_TOKEN"
CONNECT_TIMEOUT_S = 20.0
# Seconds after the end of its stream at which a worker exits, whatever threads are left.
EXIT_TIMEOUT_S = 5.0
# The key of a check's episode.
CHECK = "check"
NEED_ADAPTERS = (
    'it asks the model as the run started, which needs lora.publish = "adapters": set it in the '
    "run's configuration, or name a judge with an address of its own"
)


def main(argv: list[str] | None = None) -> int:
    """Runs the worker or the check; returns the exit code.

    0 means that the stream ended, 1 that no server answered or the connection was lost, 130 Ctrl-C.
    A check ends the process itself: with 0 if it passed, with 2 if it failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.client.worker", description="Runs one environment."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--connect", metavar="ADDRESS", help="unix:PATH or HOST:PORT of the server")
    what.add_argument("--check", metavar="MODULE:CLASS", help="load it and play a first step")
    parser.add_argument("--record", type=int, metavar="FD", help="where to note calls (--connect)")
    parser.add_argument("--args", default="{}", metavar="JSON", help="keyword arguments (--check)")
    parser.add_argument("--search-path", default="", metavar="DIR", help="where the module lies")
    parser.add_argument("--no-play", action="store_true", help="only load it (--check)")
    parser.add_argument("--no-tools", action="store_true", help="refuse tools (--check)")
    parser.add_argument("--max-images", type=int, metavar="N", help="refuse more (--check)")
    parser.add_argument("--no-start", action="store_true", help="refuse endpoint.judge() (--check)")
    parser.add_argument("--reply", default="ok", metavar="TEXT", help="what it judges (--check)")
    parser.add_argument("--max-turns", type=int, help="warn of a limit that ends it (--check)")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="limit of a call (--check)")
    parser.add_argument("--python", metavar="PATH", help="another interpreter (--check)")
    given = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(given)
    if arguments.check is not None and arguments.python:
        from slipstream.core.machine.other_python import worker_program

        python = arguments.python
        try:
            os.execvp(python, [*worker_program(python), *given, "--python", ""])
        except OSError as error:
            cause = f"--python must be an interpreter, got {python}: {error.strerror}"
            print(cause, file=sys.stderr)
            return 2
    # The environment's prints go to stderr.
    report = os.dup(1)
    sys.stdout.flush()
    os.dup2(2, 1)
    if arguments.check is not None:
        _check(arguments, report)
    return _serve(arguments.connect, arguments.record)


def _serve(address: str, record: int | None) -> int:
    from slipstream.core.machine.owned_folder import remove_abandoned
    from slipstream.core.machine.process import die_with_parent

    token = os.environ.pop(TOKEN_VARIABLE, None)
    if address.startswith("unix:"):
        die_with_parent()
        # Ctrl-C reaches the whole process group; the server says when its workers end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker that was killed has left the folders of its programs, which may be large.
    threading.Thread(target=remove_abandoned, daemon=True).start()
    code = 1
    try:
        asyncio.run(_attach(address, token, record))
        code = 0
    except _NotConnected as error:
        print(f"slipstream worker: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    finally:
        timer = threading.Timer(EXIT_TIMEOUT_S, os._exit, (code,))
        timer.daemon = True
        timer.start()
    return code


class _NotConnected(Exception):
    """No server answers, or the connection to the server was lost."""


async def _attach(address: str, token: str | None, record: int | None) -> None:
    import grpc.aio
    from slipstream.client.environment_loader import CallTracker
    from slipstream.client.episode_host import EpisodeHost, answer_commands, open_stream
    from slipstream.core.errors import ConfigError
    from slipstream.protocol.access.security import Credentials, call_metadata, open_channel
    from slipstream.v1 import environment_pb2 as pb
    from slipstream.v1 import environment_pb2_grpc

    credentials = Credentials(certificate=None, key=None, ca=None, token=token)
    try:
        channel = open_channel(address, credentials)
    except ConfigError as error:
        raise _NotConnected(str(error)) from error
    async with channel:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await channel.channel_ready()
        except TimeoutError:
            raise _NotConnected(
                f"no server answers at {address} within {CONNECT_TIMEOUT_S:g} s"
            ) from None
        stub = environment_pb2_grpc.WorkerServiceStub(channel)
        hello = pb.WorkerHello(token=token or "")
        try:
            attach = partial(stub.Attach, metadata=call_metadata(credentials))
            call = await open_stream(attach, hello)
            host = EpisodeHost(tracker=None if record is None else CallTracker(record))
            await answer_commands(host, aiter(call), call.write)
        except grpc.aio.AioRpcError as error:
            raise _NotConnected(f"{address}: {error.details()}") from error


class _Check:
    """Plays the first step of an environment's first task; ends the process when it fails."""

    def __init__(self, options: argparse.Namespace) -> None:
        from slipstream.client.episode_host import EpisodeHost

        self._options = options
        self._host = EpisodeHost()
        self._main_thread = threading.get_ident()

    async def run(self) -> str:
        """Makes the check; returns a line on tasks and first step, or only on the loaded class."""
        from slipstream.client.terminal import counted

        options, key = self._options, {"episode_key": CHECK}
        spec = {"reference": options.check, "args_json": options.args}
        loading = await self._ask(load={"spec": spec | {"search_path": options.search_path}})
        num_tasks = loading.loaded.num_tasks
        if self._host.asks_start and options.no_start:
            self._fail(NEED_ADAPTERS)
        if options.no_play:
            return f"environment {options.check} is loaded"
        opening = (await self._ask(reset=key)).observation
        self._look_at(opening)
        if opening.is_agent:
            played = await self._begin_agent()
        else:
            played = await self._step(opening.given_reply)
        await self._ask(close=key)
        tasks = counted(num_tasks, "task") if num_tasks else "tasks without end"
        return f"environment {options.check} is ready: {tasks}, {played}"

    async def _begin_agent(self) -> str:
        from slipstream.core.errors import WARNING

        answer = await self._ask(follow_agent={"episode_key": CHECK})
        if answer.HasField("agent_result"):
            self._fail("run() ended without a call to its endpoint")
        if self._options.max_turns == 1:
            refused = "with sampling.max_turns = 1 an agent's second call is refused (400)"
            print(f"{WARNING}{refused}", file=sys.stderr)
        return f"the first call is {answer.agent_call.method} {answer.agent_call.path}"

    async def _step(self, given: str) -> str:
        reply = given or self._options.reply
        verdict = (await self._ask(step={"episode_key": CHECK, "reply": reply})).verdict
        whose = "its own reply" if given else f"the reply {reply!r}"
        return f"reward {verdict.reward:g} for {whose}"

    async def _ask(self, **command: Any) -> pb.WorkerMessage:  # noqa: ANN401 - fields of messages
        from slipstream.v1 import environment_pb2 as pb

        timer = threading.Timer(self._options.timeout_s, self._abandon)
        timer.daemon = True
        timer.start()
        answer = await self._host.answer(pb.WorkerCommand(**command))
        timer.cancel()
        if answer.HasField("failure"):
            self._fail(answer.failure.message)
        return answer

    def _look_at(self, opening: pb.Observation) -> None:
        from slipstream.client.terminal import counted
        from slipstream.core.template_values import NEED_PARSER

        if opening.tools_json and self._options.no_tools:
            self._fail(NEED_PARSER)
        parts = [part for message in opening.messages for part in message.parts]
        images, most = {part.image for part in parts if part.image}, self._options.max_images
        if most is not None and len(images) > most:
            shown = counted(len(images), "image")
            self._fail(f"its first task shows {shown}, more than sampling.max_images = {most}")

    def _abandon(self) -> NoReturn:
        from slipstream.client.environment_loader import running_place

        place = running_place(self._main_thread)
        innermost = sys._current_frames()[self._main_thread].f_code.co_filename
        if Path(innermost).name == "selectors.py":
            place = self._host.agent_place(CHECK) or "it awaits something that does not come"
        self._fail(f"no answer within {self._options.timeout_s:g} s ({place})")

    def _fail(self, cause: str) -> NoReturn:
        # This is the last line of stderr, after all that the environment has printed.
        sys.stdout.flush()
        sys.stderr.flush()
        line = f"environment {self._options.check}: {cause}\n"
        os.write(2, line.encode(errors="backslashreplace"))
        os._exit(2)


def _check(options: argparse.Namespace, report: int) -> NoReturn:
    os.write(report, f"{asyncio.run(_Check(options).run())}\n".encode())
    # Threads of the environment must not keep the process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
