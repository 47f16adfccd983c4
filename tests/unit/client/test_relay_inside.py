"""The relay in a sandbox: the address of the model in a namespace without any network."""

import asyncio
import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.client import relay_inside
from slipstream.client.episode_host import EpisodeHost
from slipstream.core.errors import ConfigError
from slipstream.environments.command import Command
from slipstream.v1 import environment_pb2 as pb
from support.fakes.scripted_server import Episode, Handler, answers, chat_chunk, event

pytestmark = pytest.mark.process

LIMIT_S = 120.0
NAMESPACE = ["unshare", "--user", "--map-root-user", "--net", "--"]
RELAY = ["python3", "{SLIPSTREAM_RELAY}", "{SLIPSTREAM_SOCKET}"]
ASK = """
import json, os, sys, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = {"messages": [{"role": "user", "content": sys.argv[1]}], "stream": "stream" in sys.argv}
asked = urllib.request.Request(url, json.dumps(body).encode())
with urllib.request.urlopen(asked) as answer:
    text = answer.read().decode()
open("score", "w").write(str(float(sys.argv[2] in text)))
"""


@functools.cache
def has_namespaces() -> bool:
    tried = subprocess.run([*NAMESPACE, "true"], stderr=subprocess.DEVNULL, check=False)
    return tried.returncode == 0


needs_namespaces = pytest.mark.skipif(
    not has_namespaces(), reason="this user may not make network namespaces"
)


async def played(
    command: list[str], handler: Handler | None = None
) -> pb.WorkerMessage:
    environment = Command(
        command, ["hello"], score_file="score", relay=True, limit_s=60.0
    )
    host = EpisodeHost(environment)
    try:
        episode = Episode(host, handler or answers(str.upper))
        return await asyncio.wait_for(episode.run(), LIMIT_S)
    finally:
        await host.close_all()


@needs_namespaces
async def test_a_program_without_network_calls_its_model() -> None:
    message = await played(
        [*NAMESPACE, *RELAY, sys.executable, "-c", ASK, "{task}", "HELLO"]
    )
    assert message.agent_result.reward == 1.0
    assert message.agent_result.metrics["exit_0"] == 1.0


@needs_namespaces
async def test_a_detached_relay_serves_what_comes_after_it() -> None:
    script = '"$@" && exec "$PY" -c "$ASK" hello HELLO'
    variables = ["env", f"ASK={ASK}", f"PY={sys.executable}"]
    command = [*NAMESPACE, *variables, "sh", "-c", script, "sh", *RELAY, "--detach"]
    message = await played([*command, "{task}"])
    assert message.agent_result.reward == 1.0


@needs_namespaces
async def test_a_stream_comes_through_the_relay() -> None:
    async def stream(call: pb.AgentCall):
        yield event(chat_chunk("one"), first=True)
        yield event(chat_chunk("two", "stop"))
        yield event("[DONE]", last=True)

    command = [*NAMESPACE, *RELAY, sys.executable, "-c", ASK, "{task}", "two", "stream"]
    message = await played(command, stream)
    assert message.agent_result.reward == 1.0


@needs_namespaces
async def test_a_program_without_network_reaches_nothing_else() -> None:
    code = """
import socket
reached = []
for address in (("127.0.0.1", 22), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, 2)
        reached.append(address)
    except OSError:
        pass
open("score", "w").write(str(float(not reached and len(socket.if_nameindex()) == 1)))
"""
    message = await played([*NAMESPACE, *RELAY, sys.executable, "-c", code, "{task}"])
    assert message.agent_result.reward == 1.0


@needs_namespaces
@pytest.mark.parametrize(
    ("code", "status"),
    [("import sys; sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_relay_ends_as_its_program_does(
    code: str, status: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    command = [
        *NAMESPACE,
        sys.executable,
        relay_inside.__file__,
        path,
        sys.executable,
        "-c",
        code,
    ]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        finished = subprocess.run(command, timeout=LIMIT_S, check=False)
    assert finished.returncode == status


def refused(arguments: list[str], **variables: str) -> str:
    finished = subprocess.run(
        [sys.executable, relay_inside.__file__, *arguments],
        env=dict(os.environ) | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert finished.returncode == relay_inside.REFUSED
    return finished.stderr


def test_a_relay_in_the_network_of_its_host_is_refused(tmp_path: Path) -> None:
    network = relay_inside.network()
    text = refused([str(tmp_path / "s"), "true"], SLIPSTREAM_NETWORK=network)
    assert "the sandbox shares the network of its host" in text


def test_a_relay_without_a_socket_says_so(tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert f"to {path}: " in refused([str(path), "true"], SLIPSTREAM_NETWORK="")
    assert "give SOCKET and PROGRAM" in refused([str(path)])


def test_a_relay_beside_our_own_sandbox_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave relay out"):
        Command(
            ["true", "{task}", "{SLIPSTREAM_SOCKET}"],
            ["a"],
            score_file="s",
            relay=True,
            sandbox=True,
            memory_gib=1.0,
            max_processes=9,
        )


def test_a_relay_whose_socket_no_command_names_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs \{SLIPSTREAM_SOCKET\} in command"):
        Command(["true", "{task}"], ["a"], score_file="s", relay=True)
