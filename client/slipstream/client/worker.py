"""The worker process: runs one environment for a rollout server.

    python -m slipstream.client.worker --connect unix:PATH
    python -m slipstream.client.worker --check package.module:Class --args '{"digits": 3}'

Consumes: commands of the server. Produces: one answer for each. Ends when the server closes the
stream, or dies.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import NoReturn

TOKEN_VARIABLE = "SLIPSTREAM_TOKEN"
CONNECT_TIMEOUT_S = 20.0
# Seconds after the end of its stream at which a worker exits, whatever threads are left.
EXIT_TIMEOUT_S = 5.0
ONE_CALL = (
    "it is an agent, and with sampling.max_turns = 1 its second call of the model is refused (400)"
)
NEED_ADAPTERS = (
    'it asks the model as the run started, which needs lora.publish = "adapters": set it in the '
    "run's configuration, or name a judge with an address of its own"
)


def main(argv: list[str] | None = None) -> int:
    """Runs the worker or the check.

    Exit code 0: the stream ended or the check passed; 1: no connection; 2: a failed check.
    """
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.client.worker", description="Runs one environment."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--connect", metavar="ADDRESS", help="unix:PATH or HOST:PORT of the server")
    what.add_argument("--check", metavar="MODULE:CLASS", help="load it and begin its first task")
    parser.add_argument("--record", type=int, metavar="FD", help="where to note calls (--connect)")
    parser.add_argument("--args", default="{}", metavar="JSON", help="keyword arguments (--check)")
    parser.add_argument("--search-path", default="", metavar="DIR", help="where the module lies")
    parser.add_argument("--no-tools", action="store_true", help="refuse tools (--check)")
    parser.add_argument("--max-images", type=int, metavar="N", help="refuse more (--check)")
    parser.add_argument("--one-turn", action="store_true", help="tell agents (--check)")
    parser.add_argument("--no-start", action="store_true", help="refuse endpoint.judge() (--check)")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="limit of --check")
    parser.add_argument("--python", metavar="PATH", help="another interpreter (--check)")
    arguments = parser.parse_args(argv)
    if arguments.check is not None and arguments.python is not None:
        _become_other(arguments.python, arguments)
    report = _keep_stdout()
    if arguments.check is not None:
        _check(arguments, report)
    return _serve(arguments.connect, arguments.record)


def _become_other(python: str, arguments: argparse.Namespace) -> NoReturn:
    """Goes on as the same check with the interpreter `python`; exits with 2 without one."""
    from slipstream.core.machine.other_python import worker_program

    command = [*worker_program(python), "--check", arguments.check, "--args", arguments.args]
    command += ["--search-path", arguments.search_path, "--timeout-s", str(arguments.timeout_s)]
    command += ["--no-tools"] * arguments.no_tools + ["--no-start"] * arguments.no_start
    command += ["--one-turn"] * arguments.one_turn
    if arguments.max_images is not None:
        command += ["--max-images", str(arguments.max_images)]
    try:
        os.execvp(python, command)
    except OSError as error:
        print(f"--python must be an interpreter, got {python}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _keep_stdout() -> int:
    """Sends what the environment prints to stderr; returns a descriptor of the real stdout."""
    real = os.dup(1)
    sys.stdout.flush()
    os.dup2(2, 1)
    return real


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
    """No server answers, or the connection to it was lost."""


async def _attach(address: str, token: str | None, record: int | None) -> None:
    import grpc.aio
    from slipstream.client.serving import EpisodeHost, answer_commands, open_stream
    from slipstream.client.witness import CallWitness
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
            host = EpisodeHost(witness=None if record is None else CallWitness(record))
            await answer_commands(host, aiter(call), call.write)
        except grpc.aio.AioRpcError as error:
            raise _NotConnected(f"{address}: {error.details()}") from error


def _check(options: argparse.Namespace, report: int) -> NoReturn:
    from slipstream.client.serving import EpisodeHost
    from slipstream.client.terminal import counted
    from slipstream.client.witness import running_place
    from slipstream.core.tool_schemas import NEED_PARSER
    from slipstream.v1 import environment_pb2 as pb

    reference, timeout_s = options.check, options.timeout_s
    main_thread = threading.get_ident()
    host = EpisodeHost()

    def fail(cause: str) -> NoReturn:
        # This is the last line of stderr, after all that the environment has printed.
        sys.stdout.flush()
        sys.stderr.flush()
        line = f"environment {reference}: {cause}\n"
        os.write(2, line.encode(errors="backslashreplace"))
        os._exit(2)

    def abandon() -> NoReturn:
        place = running_place(main_thread)
        innermost = sys._current_frames()[main_thread].f_code.co_filename
        if Path(innermost).name == "selectors.py":
            place = host.agent_place("check") or "it awaits something that does not come"
        fail(f"no answer within {timeout_s:g} s ({place})")

    async def commands() -> AsyncIterator[pb.WorkerMessage]:
        spec = pb.EnvironmentSpec(
            reference=reference, args_json=options.args, search_path=options.search_path
        )
        yield await host.answer(pb.WorkerCommand(load=pb.LoadCommand(spec=spec)))
        if host.asks_start and options.no_start:
            fail(NEED_ADAPTERS)
        observed = await host.answer(pb.WorkerCommand(reset=pb.ResetCommand(episode_key="check")))
        yield observed
        if observed.observation.tools_json and options.no_tools:
            fail(NEED_PARSER)
        parts = [part for message in observed.observation.messages for part in message.parts]
        images, most = {part.image for part in parts if part.image}, options.max_images
        if most is not None and len(images) > most:
            shown = counted(len(images), "image")
            fail(f"its first task shows {shown}, more than sampling.max_images = {most}")
        if observed.observation.is_agent:
            if options.one_turn:
                print(ONE_CALL, file=sys.stderr)
            asked = pb.FollowAgentCommand(episode_key="check")
            yield await host.answer(pb.WorkerCommand(follow_agent=asked))
        yield await host.answer(pb.WorkerCommand(close=pb.CloseCommand(episode_key="check")))

    async def check() -> None:
        num_tasks, first_call = 0, ""
        async for answer in commands():
            match answer.WhichOneof("message"):
                case "failure":
                    fail(answer.failure.message)
                case "agent_result":
                    fail("run() ended without a call to its endpoint")
                case "agent_call":
                    call = answer.agent_call
                    first_call = f", the first call is {call.method} {call.path}"
            num_tasks = max(num_tasks, answer.loaded.num_tasks)
        tasks = counted(num_tasks, "task") if num_tasks else "tasks without end"
        os.write(report, f"environment {reference} is ready: {tasks}{first_call}\n".encode())

    timer = threading.Timer(timeout_s, abandon)
    timer.daemon = True
    timer.start()
    asyncio.run(check())
    # Threads of the environment must not keep the process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
