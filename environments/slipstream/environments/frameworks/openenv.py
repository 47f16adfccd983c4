"""Environments of OpenEnv 0.10, which run on servers of their own.

    [[environments]]
    name = "game"
    reference = "slipstream.environments.frameworks.openenv:OpenEnv"
    args = { base_url = "http://127.0.0.1:8000", action = { guess = "{number}" } }

Every episode is a session of its own on the server's WebSocket, from its reset to its end.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from slipstream.client.environment import Environment, Message, StepResult, TaskSequence
from slipstream.core.errors import ConfigError
from slipstream.core.machine.process import die_with_parent
from slipstream.environments.arguments import FIELD, filled
from slipstream.environments.frameworks.packages import Foreign, import_function, import_package

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

# The port at which every image of OpenEnv answers.
INSIDE_PORT = 8000
# Seconds within which Docker must describe an image.
ASK_LIMIT_S = 30.0
# Runs the image's own program, and ends it when standard input ends, which happens when Docker's
# client or the worker ends for any reason.
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

Action: TypeAlias = dict[str, Any]
# Any value of JSON.
Cell: TypeAlias = Any

FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)
# Longest text of a reply that is read as a number.
MAX_CHARACTERS = 40
REFERENCE = re.compile(r"[\w.]+:\w+")

# Arguments of the server's `reset`.
Start: TypeAlias = Mapping[str, Any]
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
MAX_MESSAGE_BYTES = 16 << 20
# Seconds between two attempts at a server that has no free session.
FULL_RETRY_S = 0.2


class OpenEnv(Environment[Start]):
    """Plays episodes on an OpenEnv server: the model reads observations and replies with actions.

    The rewards of the steps add up. A reply that is no action ends the episode with
    `invalid_reward` and the metric `invalid_action`. A server that is lost, refuses a session, or
    raises in a step fails the episode with the cause.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        command: Sequence[str] | None = None,
        image: str | None = None,
        image_options: Sequence[str] = (),
        action: str | Mapping[str, Any] = "json",
        observation: str | None = None,
        system: str | None = None,
        tasks: int | Sequence[Start] = 1000,
        first_seed: int = 0,
        metrics: Sequence[str] = (),
        invalid_reward: float = 0.0,
        full_timeout_s: float = 30.0,
    ) -> None:
        """Takes the server: its `base_url`, or a `command` or `image` that each worker starts.

        `{port}` in `command` stands for the server's port. Docker runs the container of `image`
        with `image_options`.

        `action` is "json" (the reply is the action, a JSON object); a table of the action's fields,
        in whose texts {reply} stands for the reply and {number} for its last number; or a
        "module:function" that is called with the reply. `observation` is a text in which {FIELD}
        stands for a field of the observation, or a "module:function" that is called with the
        observation; by default the model reads JSON. `tasks` is a number of seeds from `first_seed`
        on, or the arguments of each reset. `metrics` names numbers in the last observation or its
        metadata that become metrics. If a server has no free session, the episode retries for
        `full_timeout_s` seconds. Raises ConfigError for wrong arguments.
        """
        import_package("websockets", install="websockets")
        if [base_url, command, image].count(None) != 2:
            raise ConfigError("give base_url, command or image, one of them")
        if image_options and image is None:
            raise ConfigError("image_options are for image: leave them out")
        self._url = None if base_url is None else _websocket_url(base_url)
        self._server = None if command is None else ServerProcess(command)
        if image is not None:
            self._server = ServerProcess(container_command(image, image_options), is_container=True)
        self._action = action_maker(action)
        self._observe = observation_text(observation)
        self._system = system
        self._tasks = _starts(tasks, first_seed)
        self._metrics = tuple(metrics)
        self._invalid_reward, self._full_timeout_s = invalid_reward, full_timeout_s
        self._socket: ClientConnection | None = None
        self._turns = 0

    def tasks(self) -> TaskSequence[Start]:
        """Returns the tasks, each the arguments of a reset."""
        return self._tasks

    async def reset(self, task: Start) -> list[Message]:
        """Opens a session, resets it, and returns the first observation.

        Raises RuntimeError if no server answers or no session becomes free.
        """
        seen = await self._open(task)
        if seen.get("done"):
            raise RuntimeError("the server says that the episode is over at its reset")
        system = [Message("system", self._system)] if self._system else []
        return [*system, Message("user", self._observe(seen["observation"]))]

    async def step(self, reply: str) -> StepResult:
        """Sends the reply's action; returns the action's reward and the next observation."""
        self._turns += 1
        try:
            action = self._action(reply)
            seen = await self._ask("step", action)
        except NoAction:
            metrics = {"turns": float(self._turns), "invalid_action": 1.0}
            return StepResult(self._invalid_reward, metrics=metrics)
        reward = float(seen["reward"] or 0.0)
        if not seen.get("done"):
            return StepResult(
                reward, done=False, messages=[Message("user", self._observe(seen["observation"]))]
            )
        metrics = {"turns": float(self._turns), "invalid_action": 0.0, **self._chosen(seen)}
        return StepResult(reward, metrics=metrics)

    async def close(self) -> None:
        """Ends the session, if there is one."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _open(self, task: Start) -> dict[str, Any]:
        """Opens a session and resets it; while the server is full, retries for `full_timeout_s`."""
        loop = asyncio.get_running_loop()
        full_at_s = loop.time() + self._full_timeout_s
        while True:
            self._socket = await self._connect()
            try:
                return await self._ask("reset", dict(task))
            except _ServerFull as error:
                await self.close()
                if loop.time() > full_at_s:
                    raise RuntimeError(
                        f"no session was free within {self._full_timeout_s:g} s: {error}; raise "
                        f"max_concurrent_envs of the server"
                    ) from None
                await asyncio.sleep(FULL_RETRY_S)

    async def _connect(self) -> ClientConnection:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        url = self._url
        if self._server is not None:
            url = _websocket_url(await self._server.base_url())
        assert url is not None
        try:
            return await connect(
                url,
                open_timeout=CONNECT_TIMEOUT_S,
                close_timeout=CLOSE_TIMEOUT_S,
                max_size=MAX_MESSAGE_BYTES,
                proxy=None,
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            raise RuntimeError(f"no OpenEnv server answers at {url}: {_said(error)}") from error

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Sends one message and returns the data of the server's answer.

        Raises _ServerFull, NoAction or, for other errors and a lost server, RuntimeError.
        """
        from websockets.exceptions import ConnectionClosed

        assert self._socket is not None
        try:
            # A server without a free session answers, then closes the connection: read the answer.
            with contextlib.suppress(ConnectionClosed):
                await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._socket.recv())
        except ConnectionClosed as error:
            cause = self._server.ended() if self._server is not None else ""
            raise RuntimeError(
                f"the OpenEnv server was lost in {kind}: {cause or _said(error)}"
            ) from error
        said = answer.get("data") or {}
        if answer.get("type") != "error":
            return dict(said)
        code, message = said.get("code"), said.get("message")
        if code == "CAPACITY_REACHED":
            raise _ServerFull(message)
        if code == "VALIDATION_ERROR" and kind == "step":
            raise NoAction(message)
        raise RuntimeError(f"the OpenEnv server refuses {kind}: {message} ({code})")

    def _chosen(self, seen: Mapping[str, Any]) -> dict[str, float]:
        """Returns the values of the metrics that the argument `metrics` names.

        Raises RuntimeError for a value that is no number.
        """
        observation = seen["observation"]
        fields = {**(observation.get("metadata") or {}), **observation}
        chosen = {}
        for name in self._metrics:
            value = fields.get(name)
            if not isinstance(value, int | float):
                known = ", ".join(
                    key for key, each in fields.items() if isinstance(each, int | float)
                )
                raise RuntimeError(f"{name} is no number of the observation; these are: {known}")
            chosen[name] = float(value)
        return chosen


class _ServerFull(Exception):
    """The server has no free session."""


class _Seeds(Sequence[Start]):
    def __init__(self, first: int, count: int) -> None:
        self._seeds = range(first, first + count)

    def __len__(self) -> int:
        return len(self._seeds)

    def __getitem__(self, index: Foreign) -> Foreign:
        return {"seed": self._seeds[index]}


def _starts(tasks: int | Sequence[Start], first_seed: int) -> TaskSequence[Start]:
    if isinstance(tasks, int):
        if tasks < 1 or first_seed < 0:
            raise ConfigError(
                f"tasks must be at least 1 and first_seed at least 0, got {tasks} and {first_seed}"
            )
        return _Seeds(first_seed, tasks)
    for task in tasks:
        if not isinstance(task, Mapping):
            raise ConfigError(f"a task is an object that reset is given, got {task!r}")
    return tasks


def _websocket_url(base_url: str) -> str:
    kind, mark, rest = base_url.rstrip("/").partition("://")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if not mark or kind not in schemes or not rest:
        raise ConfigError(f"base_url must begin with http:// or https://, got {base_url!r}")
    return f"{schemes[kind]}://{rest}/ws"


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


def action_maker(rule: str | Mapping[str, Any]) -> Callable[[str], Action]:
    """Returns the function that turns a reply into an action by `rule`.

    `rule` is the argument `action` of `OpenEnv`. The returned function raises NoAction for a reply
    that is no action. Raises ConfigError if `rule` is invalid.
    """
    if rule == "json":
        return _json_action
    if isinstance(rule, str):
        called = import_function("action", rule)

        def by_function(reply: str) -> Action:
            try:
                made = called(reply)
            except ValueError as error:
                raise NoAction(str(error)) from error
            if not isinstance(made, Mapping):
                raise TypeError(f"{rule} must return the fields of an action, got {made!r}")
            return dict(made)

        return by_function
    if not {"reply", "number"} & set(FIELD.findall(json.dumps(rule))):
        raise ConfigError(f"action must name {{reply}} or {{number}} in a text, got {dict(rule)}")
    return lambda reply: dict(_filled(rule, reply))


class NoAction(Exception):
    """A reply is no action of the environment."""


def observation_text(rule: str | None) -> Callable[[Mapping[str, Any]], str]:
    """Returns the function that turns an observation into a text by `rule`.

    If `rule` is None, the text is JSON. Raises ConfigError if `rule` is invalid.
    """
    if rule is None:
        return lambda observation: _as_text(
            {name: value for name, value in observation.items() if name != "metadata"}
        )
    if REFERENCE.fullmatch(rule):
        called = import_function("observation", rule)
        return lambda observation: str(called(observation))
    named = FIELD.findall(rule)
    if not named:
        raise ConfigError(f"observation must name a field of it as {{FIELD}}, got {rule!r}")

    def by_text(observation: Mapping[str, Any]) -> str:
        for name in named:
            if name not in observation:
                known = ", ".join(observation)
                raise KeyError(f"the observation has no field {name!r}; its fields are {known}")
        return FIELD.sub(lambda found: _as_text(observation[found[1]]), rule)

    return by_text


def _as_text(value: Cell) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json_action(reply: str) -> Action:
    """Returns the JSON object in the reply's last block between ```, else in the whole reply.

    Raises NoAction if there is no such object.
    """
    blocks = FENCED.findall(reply)
    try:
        action = json.loads(blocks[-1] if blocks else reply)
        # Python reads Infinity and 1e999, which JSON cannot hold.
        json.dumps(action, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise NoAction(str(error)) from error
    if not isinstance(action, dict):
        raise NoAction(f"an action is a JSON object, got {reply[:100]!r}")
    return action


def _filled(rule: Cell, reply: str) -> Cell:
    """Replaces {reply} and {number} in the texts of a rule; a text "{number}" becomes a number.

    Raises NoAction if the rule needs a number and the reply has none.
    """
    if isinstance(rule, Mapping):
        return {name: _filled(value, reply) for name, value in rule.items()}
    if isinstance(rule, list):
        return [_filled(value, reply) for value in rule]
    if not isinstance(rule, str):
        return rule
    number = ""
    if "{number}" in rule:
        numbers = NUMBER.findall(reply)
        if not numbers:
            raise NoAction(f"there is no number in {reply[:100]!r}")
        number = numbers[-1]
        if len(number) > MAX_CHARACTERS:
            raise NoAction(f"a number of over {MAX_CHARACTERS} characters: {number[:100]!r}")
        if rule == "{number}":
            return float(number) if "." in number else int(number)
    return filled(rule, {"reply": reply, "number": number})


class ServerProcess:
    """The server process of one worker; an episode starts it if it is not running.

    The process shares the worker's stdout and stderr.
    """

    def __init__(self, command: Sequence[str], *, is_container: bool = False) -> None:
        """Raises ConfigError unless `command` is a list with `{port}` in an argument.

        If `is_container`, /health is polled, since the port of a container accepts connections
        before its server does.
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
        """Starts the server unless it runs, and returns its address once it answers.

        Raises RuntimeError if the server ends while it starts. Only the time limit of the episode
        ends the wait for an answer.
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
        """Returns how the server ended, or "" while it runs."""
        if self._process is None or self._process.poll() is None:
            return ""
        code = self._process.returncode
        return f"{self._command[0]} ended with code {code}; the worker's log has its output"

    async def close(self) -> None:
        """Ends the server now; otherwise it would run until the worker ends."""
        if self._process is not None:
            await asyncio.to_thread(_stop, self._process)

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            self._port = probe.getsockname()[1]
        try:
            self._process = subprocess.Popen(
                [part.replace("{port}", str(self._port)) for part in self._command],
                # Nothing is written: the pipe closes with this process, and ends the container.
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
    """Ends a server and waits for its end; Docker's client passes the signal to its container."""
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def container_command(image: str, options: Sequence[str]) -> list[str]:
    """Returns the command that runs `image` and serves it on loopback at `{port}`.

    `options` are options of `docker run`. Raises ConfigError when Docker or the image is missing.
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
    """Returns the image's program with its arguments.

    Raises ConfigError if the image has none, or if Docker does not answer or has no such image.
    """
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
