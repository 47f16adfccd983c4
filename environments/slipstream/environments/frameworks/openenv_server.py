"""A server of an environment that a worker starts: a program, or a container image run by Docker.

Waits for: the port to answer. Unblocked by: an answer, the end of the process, or the limit.
"""

import asyncio
import atexit
import contextlib
import json
import socket
import subprocess
from collections.abc import Sequence

from slipstream.core.errors import ConfigError
from slipstream.core.machine.process import die_with_parent

# The port at which every image of OpenEnv answers.
INSIDE_PORT = 8000
# Seconds for Docker to say what it knows of an image.
ASK_LIMIT_S = 30.0
# Runs the image's own program, and ends it when standard input ends: that is when Docker's client
# is gone, whatever has killed it or the worker.
_UNTIL_THE_INPUT_ENDS = """
exec 3<&0
"$@" </dev/null 3<&- &
server=$!
{ cat <&3 >/dev/null; kill "$server"; sleep 5; kill -9 "$server"; } 2>/dev/null &
wait "$server"
"""

LOOPBACK = "127.0.0.1"
LOOK_S = 0.05
STOP_LIMIT_S = 5.0


class ServerProcess:
    """One server, started by the first episode, and again by the next one after it has ended.

    It prints where its worker prints.
    """

    def __init__(self, command: Sequence[str], *, is_container: bool = False) -> None:
        """Raises ConfigError when `command` is no program with `{port}` in an argument.

        A container's port takes connections before its server does, so its health is asked.
        """
        if isinstance(command, str) or not command or not any("{port}" in c for c in command):
            raise ConfigError(
                f"command is a list: the program, then its arguments, one with {{port}}, "
                f"got {command!r}"
            )
        self._command = tuple(command)
        self._is_container = is_container
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    async def base_url(self) -> str:
        """Returns the address of the server, which answers. Raises RuntimeError when it has ended.

        The episode's own limit bounds the wait.
        """
        async with self._starting:
            is_new = False
            while self._process is None or not await self._answers():
                ended = self.ended()
                if ended and is_new:
                    raise RuntimeError(f"the server did not start: {ended}")
                if ended or self._process is None:
                    self._start()
                    is_new = True
                await asyncio.sleep(LOOK_S)
        return f"http://{LOOPBACK}:{self._port}"

    def ended(self) -> str:
        """Returns how the server ended; "" while it runs."""
        if self._process is None or self._process.poll() is None:
            return ""
        code = self._process.returncode
        return f"{self._command[0]} ended with code {code}; the worker's log has its output"

    async def close(self) -> None:
        """Ends the server, which the end of the worker does otherwise."""
        if self._process is not None:
            await asyncio.to_thread(_stop, self._process)

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            self._port = probe.getsockname()[1]
        try:
            self._process = subprocess.Popen(
                [part.replace("{port}", str(self._port)) for part in self._command],
                # Nothing is written: the pipe ends with this process, which a container notices.
                stdin=subprocess.PIPE if self._is_container else subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise RuntimeError(f"the server did not start: {self._command[0]}: {error}") from error
        atexit.register(_stop, self._process)

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(LOOPBACK, self._port)
        except OSError:
            return False
        try:
            if not self._is_container:
                return True
            writer.write(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
            return b" 200 " in await reader.readline()
        except OSError:
            return False
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a server at the end of the worker; a container's client passes the signal on."""
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def container_command(image: str, options: Sequence[str]) -> list[str]:
    """Returns the command that runs `image` and serves it on loopback at `{port}`.

    `options` are those of `docker run`. Raises ConfigError when Docker or the image is missing.
    """
    if isinstance(options, str) or not all(isinstance(option, str) for option in options):
        raise ConfigError(f"image_options must be a list of texts, got {options!r}")
    return [
        *("docker", "run", "--rm", "--init", "--interactive", "--pull", "never"),
        *("--publish", f"127.0.0.1:{{port}}:{INSIDE_PORT}"),
        *options,
        *("--entrypoint", "/bin/sh", image, "-c", _UNTIL_THE_INPUT_ENDS, "sh"),
        *_program_of(image),
    ]


def _program_of(image: str) -> list[str]:
    """Returns the program that the image runs, with its arguments."""
    asked = ["docker", "image", "inspect", "--format", "{{json .Config}}", image]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_LIMIT_S)
    except OSError as error:
        raise ConfigError(
            f"image {image!r} needs Docker, and the program docker does not start "
            f"({error.strerror}): install it, or give base_url or command"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"docker said nothing of image {image!r} in {ASK_LIMIT_S:g} s") from error
    if done.returncode:
        said = " ".join(done.stderr.split())[-300:]
        raise ConfigError(
            f"docker shows no image {image!r} ({said}): on each machine with a rollout server "
            "Docker must run, and the image be pulled or built"
        )
    config = json.loads(done.stdout)
    program = [*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())]
    if not program:
        raise ConfigError(f"image {image!r} starts no program: it needs CMD or ENTRYPOINT")
    return program
