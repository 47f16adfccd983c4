"""A run on loopback answers nobody without its token, and code in a sandbox reaches no run."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from slipstream.client.client import Client
from slipstream.client.run_folder import begin_run, find_run, identified, write_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from slipstream.environments.sandbox import Sandbox
from slipstream.environments.sandbox.sandbox import BACKENDS, why_not
from slipstream.learner.controller.application import Controller
from slipstream.protocol.access.run_token import run_credentials
from slipstream.protocol.release import RELEASE, RELEASE_KEY
from slipstream.v1 import environment_pb2, status_pb2, trajectory_pb2
from support.rigs.completed import completed
from support.rigs.controller_runs import make_config
from support.rigs.waiting import LIMIT_S, until

# Calls methods of gRPC by hand, each with its metadata, over each kind of socket, and prints what
# comes back. With "token" it first tries to read that file.
STRANGER = """
import json, os, socket, struct
given = json.load(open("given.json"))
def frame(kind, flags, stream, data):
    length = struct.pack(">I", len(data))[1:]
    return length + bytes([kind, flags]) + struct.pack(">I", stream) + data
def header(name, value):
    name, value = name.encode(), value.encode()
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value
def call(kind, protocol, method, body, metadata):
    usual = {":method": "POST", ":scheme": "http", ":path": "/slipstream.v1." + method}
    usual |= {":authority": "x", "te": "trailers", "content-type": "application/grpc"}
    head = b"".join(header(*pair) for pair in (usual | metadata).items())
    with socket.socket(socket.AF_INET, kind, protocol) as s:
        s.connect(("127.0.0.1", given["port"]))
        s.settimeout(20)
        s.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + frame(4, 0, 0, b""))
        message = b"\\0" + struct.pack(">I", len(body)) + body
        s.sendall(frame(1, 4, 1, head) + frame(0, 1, 1, message))
        said = b""
        while b"grpc-status" not in said and (part := s.recv(65536)):
            said += part
    return "".join(chr(c) if 32 <= c < 127 else " " for c in said).replace("%20", " ")
metadata = dict(given["metadata"])
if given["token_file"]:
    try:
        metadata["authorization"] = "Bearer " + open(given["token_file"]).read().strip()
    except OSError as error:
        print("no token:", type(error).__name__)
for method, body in given["calls"]:
    for protocol in (0, 262):
        try:
            print(method, call(socket.SOCK_STREAM, protocol, method, bytes.fromhex(body), metadata))
        except OSError as error:
            print(method, type(error).__name__)
"""


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as connection:
        return connection.connect_ex((host, int(port))) == 0


@asynccontextmanager
async def live(tmp_path: Path) -> AsyncIterator[tuple[Config, Controller]]:
    """A run as a command begins it, whose settings have no token; its controller is in here."""
    config = make_config(tmp_path, run__steps=100_000)
    config.run_dir.mkdir(mode=0o700)
    begin_run(config, config.controller.address)
    write_config(config, config.run_dir)
    assert config.run.id is not None
    config = identified(config, config.controller.address, config.run.id)
    controller = Controller(config, run_credentials(config))
    running = asyncio.ensure_future(controller.run())
    try:
        # A first event may come before the server listens.
        await until(lambda: listens(config.controller.address) or running.done())
        yield config, controller
    finally:
        controller.stop("the test is over")
        await asyncio.wait_for(running, LIMIT_S)


def given(config: Config, tmp_path: Path, **changes: object) -> str:
    """The file by which the stranger learns more than it could: even the id of the run."""
    program = tmp_path / "program"
    spec = environment_pb2.EnvironmentSpec(
        name="fromwithin",
        reference="my_module:Class",
        weight=1.0,
        timeout_s=5.0,
        num_workers=1,
        args_json="{}",
        purpose=trajectory_pb2.EPISODE_PURPOSE_TRAINING,
        python=str(program),
        search_path=str(tmp_path),
    )
    messages = {
        "StatusService/GetStatus": status_pb2.GetStatusRequest(),
        "EnvironmentService/ListEnvironments": environment_pb2.ListEnvironmentsRequest(),
        "EnvironmentService/SubmitEnvironment": environment_pb2.SubmitEnvironmentRequest(
            spec=spec
        ),
        "StatusService/StopRun": status_pb2.StopRunRequest(reason="a stranger"),
    }
    calls = [
        (method, message.SerializeToString().hex())
        for method, message in messages.items()
    ]
    port = int(config.controller.address.rpartition(":")[2])
    metadata = {"slipstream-run": config.run.id, RELEASE_KEY: RELEASE}
    usual = {"port": port, "metadata": metadata, "calls": calls, "token_file": ""}
    return json.dumps(usual | changes)


def outside(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "given.json").write_text(text)
    done = completed([sys.executable, "-I", "-c", STRANGER], cwd=folder)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    "metadata", [None, {}, {"authorization": f"Bearer {'t' * 64}"}]
)
async def test_a_stranger_on_the_machine_learns_and_does_nothing(
    tmp_path, metadata
) -> None:
    async with live(tmp_path) as (config, controller):
        changes = {} if metadata is None else {"metadata": metadata}
        text = given(config, tmp_path, **changes)
        answers = await asyncio.to_thread(outside, tmp_path / "stranger", text)
        assert answers.count("the token is missing or wrong (security.token_file)") >= 4
        assert config.run.id not in answers
        assert str(tmp_path) not in answers
        assert "my_module" not in answers
        assert [*controller.books.environments.entries] == ["e"]
        assert not controller._progress.is_over


async def test_who_may_read_the_folder_is_answered(tmp_path: Path) -> None:
    """The stranger's program works: with the token its calls are answered."""
    async with live(tmp_path) as (config, controller):
        text = given(config, tmp_path, token_file=str(config.run_dir / "token"))
        answers = await asyncio.to_thread(outside, tmp_path / "operator", text)
        assert config.run.id in answers
        # Also of the operator: a program that the settings do not name.
        assert (
            "python must be empty, that of the run or one of security.submitted_paths"
            in answers
        )
        assert [*controller.books.environments.entries] == ["e"]
        assert controller._progress.is_over


@pytest.mark.parametrize("backend", BACKENDS)
async def test_code_in_a_sandbox_reaches_no_controller_and_reads_no_token(
    backend, tmp_path
):
    if reason := why_not(backend):
        pytest.skip(reason)
    async with live(tmp_path) as (config, controller):
        text = given(config, tmp_path, token_file=str(config.run_dir / "token"))
        finished = await Sandbox(backend=backend).run(
            STRANGER, files={"given.json": text}
        )
        lines = finished.stdout.decode().splitlines()
        assert lines[0] in ("no token: PermissionError", "no token: FileNotFoundError")
        assert [line.split(" ")[1] for line in lines[1:]] == ["OSError"] * 8
        assert not controller._progress.is_over


async def test_a_client_by_address_alone_is_told_where_the_token_lies(
    tmp_path: Path,
) -> None:
    async with live(tmp_path) as (config, _):
        address = config.controller.address
        async with Client(address) as client:
            with pytest.raises(ConfigError) as refused:
                await client.status()
        assert str(refused.value) == (
            f"the controller at {address} asks for its run's token: name the run, or give "
            "token_file (--token-file), the file `token` of the run's folder"
        )
        async with Client(address, token_file=config.run_dir / "token") as client:
            assert (await client.status()).run_id == config.run.id
        run = find_run(config.run_dir)
        assert run.security.token_file == config.run_dir / "token"
        async with Client.of_run(run) as client:
            assert (await client.status()).run_id == config.run.id
