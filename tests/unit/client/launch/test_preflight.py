"""Checks before anything starts."""

import asyncio
import contextlib
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
import tomli_w
from slipstream.client.launch import preflight
from slipstream.client.launch.checks import (
    Stage,
    ask_controller,
    check_controller,
    check_interfaces,
    require,
)
from slipstream.client.launch.launcher import run_all, run_learner, run_tinker
from slipstream.client.launch.preflight import (
    check_environments,
    check_modules,
    check_vllm,
    hold_address,
)
from slipstream.client.launch.scene import (
    CONTROLLER,
    LEARNER,
    SERVER,
    WHOLE_RUN,
    Scene,
)
from slipstream.client.run_folder import write_config
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.core.machine import address as addresses
from slipstream.core.machine.address import free_port
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import (
    ControllerSection,
    EnvironmentSection,
    QueueSection,
    QueueUserSection,
    SecuritySection,
)
from slipstream.extensions.redis.launch import check_queue
from slipstream.protocol.access.security import Credentials, bind, create_server
from slipstream.protocol.access.tokens import check_own_certificate
from support.fakes.small_configs import config_of, small_config
from support.fakes.tiny_models import make_model_folder
from support.rigs.other_pythons import bare_python
from support.rigs.run_processes import until_gone
from support.rigs.valkey import EmbeddedServer
from support.rigs.waiting import LIMIT_S

ECHO = {"name": "echo", "reference": "slipstream.environments.echo:Echo"}


def test_a_free_port_is_none_that_the_kernel_gives_to_others() -> None:
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    for _ in range(20):
        port = free_port("127.0.0.1")
        assert port < int(first)
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_that_was_drawn_is_given_to_nobody_before_and_after_it_is_used(
    monkeypatch,
) -> None:
    drawn = free_port("127.0.0.1")
    refused = r"no free port on 127\.0\.0\.1 among 1 that were tried"
    monkeypatch.setattr(addresses, "UNASSIGNED_PORTS", range(drawn, drawn + 1))
    for _ in range(2):
        with pytest.raises(ConfigError, match=refused):
            free_port("127.0.0.1")
        # A different program that is no server cannot have it either.
        with socket.socket() as other, pytest.raises(OSError, match="already in use"):
            other.bind(("127.0.0.1", drawn))
        with socket.create_server(("127.0.0.1", drawn)):
            pass
    with pytest.raises(
        ConfigError, match=r"that were tried: Cannot assign requested address$"
    ):
        free_port("192.0.2.1")


def test_a_process_keeps_a_bounded_number_of_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "KEPT_PORTS", 2)
    first, *newest = [free_port("127.0.0.1") for _ in range(3)]
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
    for port in newest:
        with socket.socket() as other, pytest.raises(OSError, match="already in use"):
            other.bind(("127.0.0.1", port))


async def test_an_address_that_a_command_holds_is_for_its_own_controller_alone() -> (
    None
):
    stated = f"127.0.0.1:{free_port('127.0.0.1')}"
    with hold_address(stated) as address:
        assert address == stated
        refusal = f"cannot listen on {stated}: Address already in use; another run may have it"
        # Before the controller listens, while it does, and between two starts of it.
        for starts in (False, True, False):
            server = create_server(Credentials())
            if starts:
                assert bind(server, stated, Credentials())
                await server.start()
            with pytest.raises(ConfigError, match=refusal), hold_address(stated):
                pass
            with (
                socket.socket() as other,
                pytest.raises(OSError, match="already in use"),
            ):
                other.bind(("127.0.0.1", int(stated.rpartition(":")[2])))
            await server.stop(None)
    with hold_address(stated):
        pass


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a network namespace")
def test_an_address_whose_interface_is_down_is_refused() -> None:
    code = (
        "from slipstream.client.launch.preflight import hold_address\n"
        "with hold_address('127.0.0.1:0'):\n"
        "    pass\n"
    )
    command = ["unshare", "--net", sys.executable, "-c", code]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert process.stderr.splitlines()[-1].partition("ConfigError: ")[-1] == (
        "controller.address: cannot listen on 127.0.0.1:0: Network is unreachable; its interface "
        "is down: ip link set lo up"
    )


def test_two_commands_that_draw_the_same_free_port_do_not_share_it(monkeypatch) -> None:
    drawn = free_port("127.0.0.1")
    other = free_port("127.0.0.1")
    ports = iter((drawn, drawn, other))
    monkeypatch.setattr(preflight, "free_port", lambda _: next(ports))
    with hold_address("127.0.0.1:0") as first, hold_address("127.0.0.1:0") as second:
        assert (first, second) == (f"127.0.0.1:{drawn}", f"127.0.0.1:{other}")


@pytest.mark.parametrize("part", ["learner", "rollout_server"])
def test_parts_that_are_started_apart_need_the_controllers_port(part: str) -> None:
    config = small_config(controller={"address": "127.0.0.1:0"})
    line = "controller.address must name a port where .* separately, .* got 127.0.0.1:0"
    with pytest.raises(ConfigError, match=line):
        check_controller(Scene(config, frozenset({part})))
    message = "127.0.0.1:0 is of this machine and free"
    assert check_controller(Scene(config, WHOLE_RUN)) == message
    stated = small_config(controller={"address": "127.0.0.1:7070"})
    assert check_controller(Scene(stated, frozenset({part}))) is None


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    for name in ("a", "b"):
        make = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
        ]
        make += [
            "-nodes",
            "-subj",
            "/CN=x",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
        ]
        subprocess.run(make, cwd=folder, check=True, capture_output=True)
    (folder / "text").write_text("no PEM")
    (folder / "binary").write_bytes(b"\xff" * 64)
    return folder


@pytest.mark.process
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tls_certificate": "a.pem", "tls_key": "a.key"}, ""),
        (
            {"tls_certificate": "a.pem", "tls_key": "b.key"},
            r"b\.key cannot be used: key values m",
        ),
        ({"tls_ca": "text"}, r"security\.tls_ca .*text cannot be used: "),
        (
            {"token_file": "text"},
            r"security\.token_file must hold at least 32 characters",
        ),
        (
            {"token_file": "binary"},
            r"token_file must hold text in UTF-8, .*binary does not",
        ),
    ],
)
def test_files_of_security_are_tried_before_anything_starts(
    files, message, secrets, tmp_path
):
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"]})
    )
    security = {name: str(secrets / file) for name, file in files.items()}
    config = small_config(model={"path": str(tmp_path)}, security=security)
    with (
        pytest.raises(ConfigError, match=message)
        if message
        else contextlib.nullcontext()
    ):
        asyncio.run(
            require(Scene(config, frozenset({"learner"}), dry_run=True), Stage.SETTINGS)
        )


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and the certificates `here.pem`, `elsewhere.pem` and `late.pem` of it."""
    folder = tmp_path_factory.mktemp("authority")

    def openssl(*arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments], cwd=folder, check=True, capture_output=True
        )

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        "req", "-x509", *key, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem"
    )
    openssl("req", *key, "-subj", "/CN=x", "-keyout", "server.key", "-out", "request")
    signed = (
        "-req",
        "-in",
        "request",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-extfile",
        "names",
    )
    for name, address, days in (
        ("here", "1", "2"),
        ("elsewhere", "2", "2"),
        ("late", "1", "-1"),
    ):
        (folder / "names").write_text(
            f"subjectAltName=IP:127.0.0.{address},DNS:learner-{address}"
        )
        openssl("x509", *signed, "-days", days, "-out", f"{name}.pem")
    return folder


CLIENTS = "every client of controller.address {host}:7070"
RANKS = "security.tls_client_ca {own}"
# The certificate, the authorities of clients and of callers, the host, and who refuses it and why.
CERTIFICATES = [
    ("here", "ca", None, "127.0.0.1", None, ""),
    ("here", "ca", "ca", "learner-1", None, ""),
    # Without an authority clients are given the certificate itself.
    ("here", None, None, "127.0.0.1", None, ""),
    ("elsewhere", "ca", None, "127.0.0.1", CLIENTS, ": IP address mismatch"),
    ("here", "ca", None, "learner-2", CLIENTS, ": Hostname mismatch"),
    ("late", "ca", None, "127.0.0.1", CLIENTS, ": certificate has expired"),
    (
        "here",
        "other",
        None,
        "127.0.0.1",
        CLIENTS,
        ": unable to get local issuer certificate",
    ),
    ("here", "ca", "other", "127.0.0.1", RANKS, ", where ranks show it: "),
]


@pytest.mark.process
@pytest.mark.parametrize(
    ("certificate", "ca", "own", "host", "who", "cause"), CERTIFICATES
)
def test_a_certificate_that_clients_or_callers_refuse_is_told_at_once(
    certificate, ca, own, host, who, cause, authority: Path, secrets: Path
) -> None:
    files = {"ca": authority / "ca.pem", "other": secrets / "a.pem", None: None}
    security = SecuritySection(
        tls_certificate=authority / f"{certificate}.pem",
        tls_key=authority / "server.key",
        tls_ca=files[ca],
        tls_client_ca=files[own],
    )
    config = small_config(controller={"address": f"{host}:7070"})
    config = config.model_copy(update={"security": security})
    if who is None:
        check_own_certificate(config)
        return
    with pytest.raises(ConfigError) as caught:
        check_own_certificate(config)
    message = f"{security.tls_certificate} is refused by {who.format(host=host, own=files[own])}"
    assert f"{message}{cause}" in str(caught.value)


def two_nodes(folder: Path, **changes: dict[str, object]) -> Path:
    """Writes the settings of a learner on two nodes, and returns the file."""
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2})
    )
    table: dict[str, object] = {
        "run": {"name": "test", "steps": 10, "dir": str(folder)},
        "model": {"path": str(folder)},
        "environments": [
            {"name": "echo", "reference": "slipstream.environments.echo:Echo"}
        ],
        "algorithm": {"group_size": 4, "groups_per_step": 8, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 16, "max_episode_tokens": 64},
        "learner": {"world_size": 2, "ranks_per_node": 1, "master": "127.0.0.1:29500"},
    }
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(table | changes))
    return path


async def test_nodes_that_are_started_separately_need_a_port_that_all_know(
    tmp_path: Path,
) -> None:
    learner = {"world_size": 2, "ranks_per_node": 1, "master": "127.0.0.1:0"}
    path = two_nodes(tmp_path, learner=learner)
    message = "learner.master needs a port that all nodes know, got 0: set it, or give --master"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        await run_learner(path, [], node_rank=1, master=None, dry_run=True)


@pytest.mark.process
async def test_a_controller_that_cannot_be_trusted_is_not_waited_for(
    tmp_path: Path, authority: Path
) -> None:
    certificate = (authority / "elsewhere.pem").read_bytes()
    cause = "Hostname Verification Check failed"
    key = (authority / "server.key").read_bytes()
    server = create_server(Credentials(certificate=certificate, key=key))
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)])
    )
    await server.start()
    facts = {
        "controller": ControllerSection(address=f"127.0.0.1:{port}"),
        "security": SecuritySection(tls_ca=authority / "ca.pem"),
    }
    scene = Scene(
        config_of(tmp_path).model_copy(update=facts), SERVER, connect_timeout_s=600.0
    )
    try:
        with pytest.raises(
            ConfigError, match=rf"^the controller at 127.0.0.1:{port}: .*{cause}"
        ):
            await ask_controller(scene)
    finally:
        await server.stop(None)


async def test_a_redis_that_does_not_answer_is_told_while_the_start_waits(
    tmp_path, monkeypatch, capsys
):
    queue = QueueSection(kind="redis", redis_url="redis://127.0.0.1:1/0")
    config = config_of(tmp_path).model_copy(update={"queue": queue})
    monkeypatch.setattr(preflight, "SLOW_S", 0.0)
    with pytest.raises(ConfigError, match="does not answer within 0.5 s"):
        await check_queue(Scene(config, SERVER, connect_timeout_s=0.5))
    message = "waiting for the queue.redis_url redis://127.0.0.1:1/0, for up to 0.5 s\n"
    assert capsys.readouterr().out == message


@pytest.mark.process
async def test_a_queue_that_refuses_the_rollout_server_is_told_before_its_engine_loads(
    tmp_path: Path, authority: Path
) -> None:
    async with EmbeddedServer(tmp_path / "redis") as server:
        files = {role: tmp_path / "redis" / f"{role}" for role in ("right", "wrong")}
        files["right"] = server.password_file("rollout")
        files["wrong"].write_text("another")
        for role, file in files.items():
            user = QueueUserSection(user="rollout", password_file=file)
            queue = QueueSection(
                kind="redis", redis_url=server.address, rollout_server=user
            )
            config = config_of(tmp_path).model_copy(update={"queue": queue})
            if role == "right":
                (finding,) = await check_queue(Scene(config, SERVER))
                assert finding.seen.endswith("lets user rollout write")
                continue
            with pytest.raises(
                ConfigError, match="user rollout: invalid username-password pair"
            ):
                await check_queue(Scene(config, SERVER, connect_timeout_s=60.0))
    with pytest.raises(
        ConfigError, match=r"does not answer within 0 s: .*; check queue\.redis"
    ):
        await check_queue(Scene(config, SERVER))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "elsewhere.pem", authority / "server.key")
    async with await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context
    ) as other:
        port = other.sockets[0].getsockname()[1]
        url = f"rediss://rollout@127.0.0.1:{port}/0?ssl_ca_certs={authority / 'ca.pem'}"
        queue = QueueSection(kind="redis", redis_url=url)
        config = config.model_copy(update={"queue": queue})
        with pytest.raises(
            ConfigError, match=r"CERTIFICATE_VERIFY_FAILED.*IP address mismatch"
        ):
            await check_queue(Scene(config, SERVER, connect_timeout_s=60.0))


async def test_a_dry_run_of_a_finished_run_prints_its_settings_and_then_that_it_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = two_nodes(tmp_path, learner={"world_size": 1})
    config = load_config(path)
    journal = config.run_dir / "journal"
    journal.mkdir(parents=True)
    (journal / "journal.log").write_text("a record")
    write_config(config, config.run_dir)
    (config.run_dir / "checkpoints" / "final").mkdir(parents=True)
    summary = {"state": "finished", "steps": 10, "cause": "all steps are done"}
    (config.run_dir / "summary.json").write_text(json.dumps(summary))
    redis = "queue.redis_url='redis://127.0.0.1:1'"
    for run in (
        run_all(path, [redis], dry_run=True),
        run_learner(path, [redis], node_rank=0, master=None, dry_run=True),
    ):
        with pytest.raises(
            ConfigError, match="is finished with 10 steps; raise run.steps"
        ):
            await run
        assert tomllib.loads(capsys.readouterr().out)["run"]["steps"] == 10


async def test_a_dry_run_names_the_modules_of_environments_that_are_not_there(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("raise OSError('it is not loaded')")
    places = {
        "a": "mine:A",
        "b": "nowhere.b:B",
        "c": "slipstream.environments.echo:Echo",
    }
    table = [
        {"name": name, "reference": reference} for name, reference in places.items()
    ]
    scene = Scene(small_config(environments=table), WHOLE_RUN, dry_run=True)
    (finding,) = check_modules(scene)
    assert finding.seen == "b: there is no module nowhere"
    assert not [*check_modules(replace(scene, dry_run=False))], "a start loads them"


async def test_a_dry_run_names_the_files_of_questions_that_are_not_there(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("there.jsonl").touch()
    questions = "slipstream.environments.questions:Questions"
    demonstrations = "slipstream.environments.demonstrations:Demonstrations"
    table = [
        {"name": "a", "reference": questions, "args": {"path": "there.jsonl"}},
        {
            "name": "b",
            "reference": questions,
            "args": {"path": ["there.jsonl", "away.jsonl"]},
        },
        {"name": "c", "reference": questions, "args": {"path": "hf:owner/name"}},
        {"name": "d", "reference": questions, "args": {"path": "th*.jsonl"}},
        {"name": "e", "reference": demonstrations, "args": {"path": "away/*.parquet"}},
    ]
    findings = [
        *check_modules(Scene(small_config(environments=table), WHOLE_RUN, dry_run=True))
    ]
    assert [finding.seen for finding in findings] == [
        "b: args.path names no file, away.jsonl",
        "e: args.path names no file, away/*.parquet",
    ]


@pytest.fixture
def playing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Makes the settings of a run whose environment `e` is a class of the given code."""
    monkeypatch.chdir(tmp_path)

    def make(
        code: str, name: str, run: str = "test", audit: str = "refuse", **tables: object
    ) -> Config:
        (tmp_path / "played.py").write_text(code)
        section = {"name": "e", "reference": f"played:{name}", "timeout_s": 20.0}
        settings = {"dir": str(tmp_path), "name": run, "audit": audit}
        return small_config(run=settings, environments=[section], **tables)

    return make


SPY = """
import os
from slipstream.environments.echo import Echo

class Spy(Echo):
    def __init__(self):
        super().__init__()
        known = {"PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV", "HF_ENDPOINT"}
        seen = sorted(set(os.environ) - known)
        if os.environ.get("HF_ENDPOINT") != "http://127.0.0.1:9":
            seen.append("no_hub")
        raise ValueError(f"it sees {' '.join(seen)}.")
"""


@pytest.mark.process
async def test_an_environment_sees_no_secrets_when_it_is_checked(playing, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError) as caught:
        await check_environments(Scene(playing(SPY, "Spy")))
    # Python sets the first one itself.
    seen = str(caught.value).partition("it sees ")[2].partition(".")[0].split()
    assert set(seen) <= {"LC_CTYPE", "PYTHONHASHSEED"}, caught.value


CALLING = """
from slipstream.client import Environment, ResetResult, StepResult

class Calling(Environment):
    def tasks(self):
        return [1]

    def reset(self, task):
        look = {"type": "function", "function": {"name": "look"}}
        return ResetResult([{"role": "user", "content": "look"}], tools=[look])

    def step(self, reply):
        return StepResult()
"""


@pytest.mark.process
async def test_an_environment_with_tools_needs_a_parser_before_anything_starts(
    playing, capsys
):
    with pytest.raises(ConfigError) as caught:
        await check_environments(Scene(playing(CALLING, "Calling")))
    assert str(caught.value) == (
        "environment e: tools need rollout_server.tool_parser, the reader of the model's tool "
        "calls: set it in the run's configuration"
    )
    assert not capsys.readouterr().err
    await check_environments(
        Scene(playing(CALLING, "Calling", rollout_server={"tool_parser": "hermes"}))
    )
    assert not capsys.readouterr().err


@pytest.mark.process
async def test_an_environment_that_shows_an_image_needs_room_for_it_before_anything_starts(
    tmp_path: Path,
) -> None:
    environment = {"name": "e", "reference": "deploy.environments.colours:Colours"}
    played = {
        "run": {"dir": str(tmp_path)},
        "environments": [environment | {"timeout_s": 20.0}],
    }
    with pytest.raises(ConfigError) as caught:
        await check_environments(Scene(small_config(**played)))
    assert str(caught.value) == (
        "environment e: it shows 1 image, more than sampling.max_images = 0"
    )
    await check_environments(Scene(small_config(**played, sampling={"max_images": 1})))


HANGING = """
import ctypes, os, subprocess, sys
from slipstream.environments.echo import Echo

class Leaving(Echo):
    '''Leaves a process behind that keeps its stderr open.'''
    def reset(self, task):
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open("helper", "w").write(str(helper.pid))
        return super().reset(task)

class Frozen(Echo):
    '''Holds the interpreter, so that no thread of its own can say so.'''
    def reset(self, task):
        ctypes.PyDLL(None).pause()
"""


@pytest.mark.process
async def test_a_check_does_not_wait_for_what_an_environment_leaves_behind(
    tmp_path, playing
):
    await asyncio.wait_for(
        check_environments(Scene(playing(HANGING, "Leaving"))), LIMIT_S
    )
    helper = int((tmp_path / "helper").read_text())
    # The helper's parent is gone; the process that adopts it must notice its end.
    with contextlib.suppress(psutil.NoSuchProcess):
        await until_gone([psutil.Process(helper)])


@pytest.mark.process
async def test_an_interpreter_that_cannot_run_a_worker_is_one_line(
    tmp_path: Path,
) -> None:
    bare = bare_python(tmp_path / "venv")
    for python, cause in (
        (
            bare,
            f"environment e: {bare} lacks what a worker needs: {bare} -m pip install 'grpcio",
        ),
        (
            tmp_path / "none",
            f"environment e: python must be the path of an interpreter, got {tmp_path}/none: ",
        ),
        # Servers look for no program by its name.
        (
            "python3",
            "environment e: python must be the path of an interpreter, got python3: "
            f"{Path.cwd()}/python3 cannot be run",
        ),
    ):
        echo = {"name": "e", "reference": "slipstream.environments.echo:Echo"}
        config = small_config(
            run={"dir": str(tmp_path)}, environments=[echo | {"python": str(python)}]
        )
        with pytest.raises(ConfigError) as caught:
            await check_environments(Scene(config))
        assert str(caught.value).startswith(cause)


MEETING = """
import pathlib, time
from slipstream.environments.echo import Echo

class Meeting(Echo):
    def __init__(self, own, other):
        super().__init__()
        pathlib.Path(own).touch()
        while not pathlib.Path(other).exists():
            time.sleep(0.01)
        if own == "b":
            raise ValueError("b came")
        if other == "c":
            raise ValueError("a met")
"""


@pytest.mark.process
async def test_a_check_that_was_killed_says_nothing_about_the_settings(
    monkeypatch, tmp_path
):
    (tmp_path / "ends_itself.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(preflight, "ENGINE_CHECK", "ends_itself")
    config = small_config(rollout_server={"tool_parser": "hermes"})
    with pytest.raises(
        RunFailed, match="vLLM did not check rollout_server: SIGKILL ended"
    ):
        await check_vllm(Scene(config))


@pytest.mark.process
@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"rollout_server": {"chat_template_kwargs": {"think": 1}}},
            "rollout_server.chat",
        ),
        (
            {"environments": [ECHO | {"chat_template_kwargs": {"think": 1}}]},
            "echo: chat",
        ),
    ],
)
async def test_values_that_the_template_does_not_read_are_refused(
    tmp_path, table, said
) -> None:
    config = small_config(**table)
    model = config.model.model_copy(
        update={"path": make_model_folder(tmp_path / "model")}
    )
    scene = Scene(config.model_copy(update={"model": model}))
    with pytest.raises(
        ConfigError, match=f"^{said}.*the chat template does not read 'think'"
    ):
        await check_vllm(scene)


@pytest.mark.process
async def test_environments_are_loaded_side_by_side_and_the_first_error_in_order_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    monkeypatch.chdir(tmp_path)

    def meeting(own: str, other: str) -> EnvironmentSection:
        args = {"own": own, "other": other}
        return EnvironmentSection(name=own, reference="meeting:Meeting", args=args)

    met = (meeting("a", "x"), meeting("x", "a"))
    failed = (meeting("a", "c"), meeting("c", "a"), meeting("b", "c"))
    config = config_of(tmp_path)
    async with asyncio.timeout(120):
        monkeypatch.setattr(preflight, "CHECKS_AT_ONCE", 2)
        await check_environments(Scene(config.model_copy(update={"environments": met})))
        (tmp_path / "a").unlink()
        with pytest.raises(ConfigError, match=r"^environment a: .*a met"):
            monkeypatch.setattr(preflight, "CHECKS_AT_ONCE", 3)
            await check_environments(
                Scene(config.model_copy(update={"environments": failed}))
            )


SILENT = """
from slipstream.environments.echo import Echo

class Silent(Echo):
    def step(self, reply):
        result = super().step(reply)
        return type(result)(0.0)
"""


@pytest.mark.process
@pytest.mark.parametrize("is_told", [True, False])
async def test_right_answers_that_earn_nothing_are_refused_unless_they_are_only_told(
    playing: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_told: bool,
) -> None:
    monkeypatch.setattr(preflight, "RUN_AUDIT_S", LIMIT_S)
    config = playing(SILENT, "Silent", audit="tell" if is_told else "refuse")
    cause = "the right answer earned 0, an empty reply 0 in "
    if is_told:
        await check_environments(Scene(config))
        assert f"warning: environment e: {cause}" in capsys.readouterr().err
    else:
        with pytest.raises(ConfigError, match=f"^environment e: {cause}"):
            await check_environments(Scene(config))


ENDING = """
import os
from slipstream.environments.echo import Echo

class Leaves(Echo):
    def step(self, reply):
        os._exit(3)

class Killed(Echo):
    def step(self, reply):
        os.kill(os.getpid(), 9)

class Unloaded(Echo):
    def tasks(self):
        os._exit(3)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Leaves", "it has ended its process by os._exit(3) (played.py:7 in step)"),
        ("Killed", "its process was ended by SIGKILL in the middle of its check"),
    ],
)
async def test_an_environment_that_ends_its_process_while_it_is_played_is_told_if_asked(
    playing: Callable[..., Config],
    capsys: pytest.CaptureFixture[str],
    name: str,
    what: str,
) -> None:
    with pytest.raises(ConfigError, match=f"^environment e: {re.escape(what)}"):
        await check_environments(Scene(playing(ENDING, name)))
    capsys.readouterr()
    # The run begins: its own limits decide what becomes of the episodes.
    await check_environments(Scene(playing(ENDING, name, audit="tell")))
    assert f"warning: environment e: {what}\n" in capsys.readouterr().err


@pytest.mark.process
async def test_an_environment_that_cannot_be_loaded_is_refused_though_others_are_told(
    playing: Callable[..., Config],
) -> None:
    config = playing(ENDING, "Unloaded", audit="tell")
    with pytest.raises(
        ConfigError, match=r"^environment e: it has ended its process by os._exit"
    ):
        await check_environments(Scene(config))


PLAIN = """
from slipstream.environments.echo import Echo as Plain
"""


@pytest.mark.process
async def test_plays_for_which_a_start_has_no_time_are_in_the_log_alone(
    playing: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(preflight, "RUN_AUDIT_S", 0.0)
    config = playing(PLAIN, "Plain")
    await check_environments(Scene(config))
    assert capsys.readouterr().err == ""
    assert (
        "had no time within 0 s"
        in (config.run_dir / "logs" / "preflight.log").read_text()
    )


PRINTING = """
import os
from slipstream.environments.echo import Echo

class Printing(Echo):
    def tasks(self):
        os.write(1, b"".join(b"line %d\\n" % n for n in range(200_000)))
        return super().tasks()
"""


@pytest.mark.process
async def test_a_log_of_the_checks_that_cannot_be_written_is_named(playing) -> None:
    config = playing(PRINTING, "Printing")
    path = config.run_dir / "logs" / "preflight.log"
    path.mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=f"^{path} cannot be written: Is a directory$"
    ):
        await check_environments(Scene(config))


@pytest.mark.process
async def test_what_an_environment_printed_last_is_kept_of_its_newest_check_alone(
    playing,
):
    config = playing(PRINTING, "Printing")
    path = config.run_dir / "logs" / "preflight.log"
    for _ in range(2):
        await check_environments(Scene(config))
        # The first one that is kept may be a part of a line.
        title, _, *lines = path.read_text().splitlines()
        assert title == "environment e:"
        # A busy machine has no time for all plays, which a line behind these says.
        lines = [line for line in lines if "had no time" not in line]
        assert lines == [f"line {n}" for n in range(200_000 - len(lines), 200_000)]
        assert len(lines) > 1000
        assert path.stat().st_size < 1 << 17


@pytest.mark.process
async def test_an_environment_that_holds_its_process_is_given_up(playing, monkeypatch):
    monkeypatch.setattr(preflight, "WORKER_GRACE_S", -75.0)
    config = playing(HANGING, "Frozen")
    with pytest.raises(
        ConfigError, match="e: its check did not end within 5 s, 20 s for each"
    ):
        await asyncio.wait_for(check_environments(Scene(config)), LIMIT_S)


@pytest.mark.process
async def test_a_refused_run_leaves_no_folder_unless_an_environment_printed(playing):
    quiet = "raise RuntimeError('no data')\n"
    for name, code in (
        ("quiet", quiet),
        ("loud", f"print('looking for data')\n{quiet}"),
    ):
        config = playing(code, "E", run=name)
        with pytest.raises(ConfigError, match="RuntimeError: no data") as caught:
            await check_environments(Scene(config))
        log = config.run_dir / "logs" / "preflight.log"
        assert config.run_dir.exists() == log.exists() == (name == "loud")
    assert str(caught.value).endswith(f"(log: {log})")
    assert "looking for data\n" in log.read_text()


@pytest.mark.parametrize("parts", [CONTROLLER | LEARNER, SERVER, WHOLE_RUN], ids=sorted)
@pytest.mark.parametrize("variable", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_an_interface_that_is_not_there_is_named_on_every_host(
    parts, variable, monkeypatch
):
    """Also on a learner's only node: gloo looks it up, after the model has loaded."""
    scene = Scene(small_config(), parts)
    monkeypatch.setenv(variable, "lo")
    assert check_interfaces(scene) is None
    monkeypatch.setenv(variable, "eth7")
    with pytest.raises(
        ConfigError, match=f"{variable}=eth7 names no interface of this host"
    ):
        check_interfaces(scene)


async def test_a_loop_begins_only_where_its_http_process_can_listen(
    tmp_path: Path,
) -> None:
    async def refusal(port: int) -> str:
        with pytest.raises(ConfigError) as caught:
            await run_tinker(
                tmp_path / "own.toml", [], port=port, in_flight=False, dry_run=True
            )
        return str(caught.value)

    taken = free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", taken)):
        assert f"--port: cannot listen on 127.0.0.1:{taken}: " in await refusal(taken)
    # The address is free now.
    assert "no such file" in await refusal(taken)
    assert "a port up to 65535, got '127.0.0.1:99999'" in await refusal(99999)
