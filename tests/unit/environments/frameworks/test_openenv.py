"""OpenEnv's protocol against a server of this process that speaks it."""

import asyncio
import contextlib
import copy
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from slipstream.client.environment import Message, StepResult, TaskSource
from slipstream.core.errors import ConfigError
from slipstream.environments.frameworks.openenv import OpenEnv
from support.rigs.waiting import LIMIT_S, until
from websockets.asyncio.server import ServerConnection, serve


class Server:
    """Counts down from 2 in each session; notes what it was told."""

    def __init__(self, sessions: int = 100) -> None:
        self.sessions, self.open = sessions, 0
        self.told: list[dict] = []

    @property
    def kinds(self) -> list[str]:
        return [message["type"] for message in self.told]

    async def __call__(self, socket: ServerConnection) -> None:
        if self.open == self.sessions:
            await self.error(socket, "CAPACITY_REACHED", "full")
            return
        self.open += 1
        left = 2
        try:
            async for text in socket:
                message = json.loads(text)
                self.told.append(message)
                if message["type"] == "reset":
                    left = message["data"].get("left", 2)
                elif message["data"].get("say") == "raise":
                    await self.error(socket, "EXECUTION_ERROR", "it raised")
                    continue
                elif message["data"].get("say") == "bad":
                    await self.error(socket, "VALIDATION_ERROR", "Invalid message")
                    continue
                elif message["data"].get("say") == "die":
                    socket.transport.abort()
                    return
                else:
                    left -= 1
                await self.answer(socket, message["type"], left)
        finally:
            self.open -= 1

    async def answer(self, socket: ServerConnection, kind: str, left: int) -> None:
        data = {
            "observation": {"left": left, "metadata": {"half": left / 2}},
            "reward": None if kind == "reset" else 0.25,
            "done": left == 0,
        }
        await socket.send(json.dumps({"type": "observation", "data": data}))

    async def error(self, socket: ServerConnection, code: str, message: str) -> None:
        data = {"code": code, "message": message}
        await socket.send(json.dumps({"type": "error", "data": data}))


@contextlib.asynccontextmanager
async def served(server: Server) -> AsyncIterator[str]:
    async with serve(server, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/"


async def play(environment: OpenEnv, task: dict, *replies: str) -> list[StepResult]:
    own = copy.copy(environment)
    try:
        await own.reset(task)
        return [await own.step(reply) for reply in replies]
    finally:
        await own.close()


SAY = {"say": "{reply}"}


async def test_an_episode_is_a_session_with_its_own_steps_and_rewards() -> None:
    server = Server()
    async with served(server) as url:
        game = OpenEnv(url, action=SAY, system="Count.", metrics=["half", "left"])
        messages = await game.reset({"seed": 3})
        assert messages == [Message("system", "Count."), Message("user", '{"left": 2}')]
        first = await game.step("one")
        assert first == StepResult(0.25, done=False, messages=[Message("user", '{"left": 1}')])
        last = await game.step("two")
        assert (last.reward, last.done) == (0.25, True)
        assert last.metrics == {"turns": 2.0, "invalid_action": 0.0, "half": 0.0, "left": 0.0}
        assert server.told == [
            {"type": "reset", "data": {"seed": 3}},
            {"type": "step", "data": {"say": "one"}},
            {"type": "step", "data": {"say": "two"}},
        ]
        await game.close()
        await until(lambda: not server.open, LIMIT_S)


async def test_a_full_server_is_asked_again_and_then_named() -> None:
    async with served(Server(sessions=1)) as url:
        game = OpenEnv(url, action=SAY, full_timeout_s=LIMIT_S)
        played = await asyncio.gather(*[play(game, {}, "one", "two") for _ in range(4)])
        assert [results[-1].done for results in played] == [True] * 4
        impatient = OpenEnv(url, action=SAY, full_timeout_s=0.0)
        await (first := copy.copy(game)).reset({})
        with pytest.raises(RuntimeError, match=r"no session was free within 0 s: full; raise max_"):
            await play(impatient, {}, "one")
        await first.close()


async def test_an_action_that_the_server_refuses_ends_the_episode_as_invalid() -> None:
    async with served(Server()) as url:
        (result,) = await play(OpenEnv(url, action=SAY, invalid_reward=-1.0), {}, "bad")
        assert (result.reward, result.done) == (-1.0, True)
        assert result.metrics == {"turns": 1.0, "invalid_action": 1.0}


async def test_a_step_that_raises_and_a_server_that_dies_are_failures_with_a_cause() -> None:
    async with served(Server()) as url:
        game = OpenEnv(url, action=SAY)
        with pytest.raises(RuntimeError, match=r"refuses step: it raised \(EXECUTION_ERROR\)"):
            await play(game, {}, "raise")
        with pytest.raises(RuntimeError, match="the OpenEnv server was lost in step: "):
            await play(game, {}, "die")
        with pytest.raises(RuntimeError, match="says that the episode is over at its reset"):
            await play(game, {"left": 0})
        with pytest.raises(RuntimeError, match="x is no number of the observation; .* left"):
            await play(OpenEnv(url, action=SAY, metrics=["x"]), {}, "one", "two")
    with pytest.raises(RuntimeError, match="no OpenEnv server answers at ws://127.0.0.1"):
        await play(game, {})


SERVER = """
import asyncio, json, os, sys
from websockets.asyncio.server import serve

async def session(socket):
    async for text in socket:
        if json.loads(text)["data"].get("say") == "die":
            os._exit(9)
        data = {"observation": {}, "reward": 1.0, "done": "step" in text}
        await socket.send(json.dumps({"type": "observation", "data": data}))

async def main():
    async with serve(session, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()

asyncio.run(main())
"""


@pytest.mark.process
async def test_a_server_that_was_started_starts_again_after_its_end() -> None:
    game = OpenEnv(command=[sys.executable, "-c", SERVER, "{port}"], action=SAY)
    async with asyncio.timeout(LIMIT_S):
        first, second = await asyncio.gather(play(game, {}, "one"), play(game, {}, "one"))
        assert (first[0].reward, second[0].reward) == (1.0, 1.0)
        with pytest.raises(RuntimeError, match="the OpenEnv server was lost in step: "):
            await play(game, {}, "die")
        await until(lambda: "ended with code 9" in game._server.ended())
        assert (await play(game, {}, "one"))[0].reward == 1.0
    await game._server.close()


@pytest.mark.process
async def test_a_server_that_does_not_start_is_a_failure_with_its_end() -> None:
    game = OpenEnv(command=[sys.executable, "-c", "raise SystemExit(4)", "{port}"], action=SAY)
    with pytest.raises(RuntimeError, match="the server did not start: .* ended with code 4"):
        await play(game, {})
    missing = OpenEnv(command=["/no/such/program", "{port}"], action=SAY)
    with pytest.raises(RuntimeError, match="the server did not start: /no/such/program"):
        await play(missing, {})


# Stands in for Docker: `run` runs the image's program here, and the port inside is the one outside.
DOCKER = """#!{python}
import json, os, subprocess, sys
if sys.argv[1:3] == ["image", "inspect"]:
    if sys.argv[-1] == "none":
        sys.exit("Error: No such image: none")
    program = [] if sys.argv[-1] == "empty" else [sys.executable, "-c", {server!r}]
    print(json.dumps({{"Entrypoint": None, "Cmd": program}}))
else:
    arguments = sys.argv[sys.argv.index("run") + 1 :]
    place = arguments.index("--entrypoint")
    with open({asked!r}, "w") as file:
        json.dump(arguments[: place + 3], file)
    port = next(a for a in arguments if a.startswith("127.0.0.1:")).split(":")[1]
    os.execv("/bin/sh", ["sh", *arguments[place + 3 :], port])
"""
WITH_HEALTH = SERVER.replace(
    "int(sys.argv[1]))", "int(sys.argv[1]), process_request=health)"
).replace(
    "async def main",
    """def health(connection, request):
    return connection.respond(200, "") if request.path == "/health" else None

async def main""",
)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `docker` on the path; the file has what it was asked to run."""
    asked = tmp_path / "asked.json"
    program = tmp_path / "docker"
    program.write_text(DOCKER.format(python=sys.executable, server=WITH_HEALTH, asked=str(asked)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return asked


@pytest.mark.process
async def test_an_image_runs_on_loopback_and_ends_when_its_client_is_killed(docker: Path) -> None:
    game = OpenEnv(image="game", image_options=["--memory", "1g"], action=SAY)
    async with asyncio.timeout(LIMIT_S):
        assert (await play(game, {}, "one"))[0].reward == 1.0
        assert game._server is not None
        process, port = game._server._process, game._server._port
        assert process is not None
        assert json.loads(docker.read_text()) == [
            *("--rm", "--init", "--interactive", "--pull", "never"),
            *("--publish", f"127.0.0.1:{port}:8000", "--memory", "1g"),
            *("--entrypoint", "/bin/sh", "game"),
        ]
        # What is killed cannot end anything: the end of the pipe does.
        children = psutil.Process(process.pid).children()
        (server,) = (child for child in children if child.cmdline()[0] == sys.executable)
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.to_thread(server.wait, LIMIT_S)
        assert await asyncio.to_thread(process.wait, LIMIT_S) != 0
        # The next episode starts it again.
        assert (await play(game, {}, "one"))[0].reward == 1.0
    await game._server.close()


@pytest.mark.process
async def test_an_image_whose_program_ends_is_a_failure_with_its_end(docker: Path) -> None:
    game = OpenEnv(image="game", action=SAY)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(RuntimeError, match="the OpenEnv server was lost in step: "):
            await play(game, {}, "die")
        assert game._server is not None
        await until(lambda: "docker ended with code 9" in game._server.ended())
    await game._server.close()


@pytest.mark.process
def test_an_image_that_cannot_run_is_refused_in_one_line(docker, monkeypatch):
    with pytest.raises(
        ConfigError, match="docker shows no image 'none' .*No such image: none.*pulled or"
    ):
        OpenEnv(image="none", action=SAY)
    with pytest.raises(ConfigError, match="image 'empty' starts no program"):
        OpenEnv(image="empty", action=SAY)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="needs Docker, and the program docker does not start"):
        OpenEnv(image="game", action=SAY)


def test_seeds_are_tasks_and_those_of_two_splits_differ() -> None:
    training = OpenEnv("http://127.0.0.1:1", action=SAY, tasks=3)
    held_out = OpenEnv("http://127.0.0.1:1", action=SAY, tasks=2, first_seed=3)
    assert [TaskSource(training)[n] for n in range(3)] == [{"seed": n} for n in range(3)]
    assert list(held_out.tasks()) == [{"seed": 3}, {"seed": 4}]
    given = OpenEnv("http://127.0.0.1:1", action=SAY, tasks=[{"level": 2}])
    assert list(given.tasks()) == [{"level": 2}]


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ({}, "give base_url, command or image, one of them"),
        ({"base_url": "http://h:1", "command": ["x", "{port}"]}, "one of them"),
        ({"base_url": "http://h:1", "image": "game"}, "one of them"),
        ({"base_url": "http://h:1", "image_options": ["-m", "1g"]}, "image_options are for image"),
        ({"image": "game", "image_options": "-m 1g"}, "image_options must be a list of texts"),
        ({"base_url": "127.0.0.1:1"}, "must begin with http:// or https://, got '127.0.0.1:1'"),
        ({"command": "run {port}"}, "command is a list"),
        ({"command": ["run"]}, "one with {port}, got"),
        ({"base_url": "http://h:1", "tasks": 0}, "tasks must be at least 1"),
        (
            {"base_url": "http://h:1", "tasks": [3]},
            "a task is an object that reset is given, got 3",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused(args: dict, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        OpenEnv(**args)
