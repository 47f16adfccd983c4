"""Wrong launches on a cluster: each is one line, before anything loads, and leaves nothing behind.

The controller that others ask is a server with its token, certificate and answer. Nothing is
trained: the model cannot even be loaded.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from slipstream.client.launch import machine
from slipstream.client.launch.check import Stage
from slipstream.client.launch.checks import require
from slipstream.client.launch.placement import uses_gpus
from slipstream.client.launch.scene import CONTROLLER, Scene
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import free_port
from slipstream.protocol.access.security import Credentials, bind, create_server
from slipstream.protocol.setup import describe_setup
from slipstream.v1 import status_pb2, status_pb2_grpc
from support.fakes.setup_answers import SetupAnswers
from support.rigs.completed import completed
from support.rigs.loopbacks import own_loopback
from support.rigs.run_processes import (
    COMMAND,
    COMMANDS,
    check_refused,
    empty_model,
    run_command,
    write_config,
)
from support.rigs.small_disks import small_disk
from support.rigs.waiting import LIMIT_S

pytestmark = [
    pytest.mark.usefixtures("nothing_survives"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
    pytest.mark.skipif(uses_gpus(), reason="the settings are for CPUs"),
]

ROOT = Path(__file__).parents[2]
MAKE = ROOT / "deploy" / "make_certificates.sh"
RUN_ID = "run-00000000"
MARK = "run/journal/journal.log"
# The first learner node of one, the second of two, a rollout server.
FIRST = ("learner", "config.toml", "--connect-timeout-s=1")
NODES = ("learner.world_size=2", "learner.ranks_per_node=1", "--master=127.0.0.1:29500")
SECOND = ("learner", "config.toml", *NODES, "--node-rank=1", "--connect-timeout-s=60")
SERVER = ("rollout-server", "config.toml", "--connect-timeout-s=60")
PATIENCE = "--connect-timeout-s=0.5"


@dataclass(frozen=True)
class Wrong:
    """A launch, and what its only line has in it."""

    words: tuple[str, ...]
    parts: tuple[str, ...]
    # Changes the answer of the controller, which is there if this is set.
    change: Callable[[status_pb2.Setup], object] | None = None
    environ: dict[str, str] = field(default_factory=dict)
    # gRPC's core logs in a process that was forked after its import, and not in a user's.
    is_forked: bool = True


def nothing(_: status_pb2.Setup) -> None:
    """The controller's host is like this one."""


WRONG = {
    "token is not there": Wrong(
        (*FIRST, "security.token_file=secrets/nothing"),
        ("security.token_file: secrets/nothing: No such file",),
    ),
    "expired certificate": Wrong(
        (*FIRST, "security.tls_certificate=late/server.pem"),
        (
            "tls_certificate late/server.pem is refused",
            "certificate has expired",
            "issues a new",
        ),
    ),
    "wrong token": Wrong(
        (*SERVER, "security.token_file=elsewhere/token"),
        ("the controller at", "the token is missing or wrong (security.token_file)"),
        nothing,
    ),
    "other authority than the controller's": Wrong(
        (*SERVER, "security.tls_ca=elsewhere/ca.pem"),
        (
            "the controller at",
            "certificate is refused (unable to get local issuer",
            "tls_ca its",
        ),
        nothing,
        is_forked=False,
    ),
    "no controller": Wrong(
        (*SERVER, PATIENCE),
        (
            "no controller answers at",
            "within 0.5 s",
            "Connection refused",
            "start the learner",
        ),
    ),
    "controller behind a firewall": Wrong(
        (*SERVER, "--controller=192.0.2.200:7070", PATIENCE),
        ("no controller answers at 192.0.2.200:7070 within 0.5 s", "firewall"),
    ),
    "controller's name is wrong": Wrong(
        (*SERVER, "--controller=no-such-host.invalid:7070", PATIENCE),
        ("no controller answers at no-such-host.invalid:7070", "no-such-host.invalid"),
    ),
    "controller's address is of another host": Wrong(
        (*FIRST, "controller.address=192.0.2.200:7070"),
        ("controller.address: cannot listen on 192.0.2.200:7070", "Cannot assign"),
    ),
    "NODE_RANK is missing": Wrong(
        ("learner", "config.toml", *NODES),
        ("the learner has 2 nodes, so each needs a --node-rank, or NODE_RANK",),
    ),
    "NODE_RANK is empty": Wrong(
        ("learner", "config.toml", *NODES),
        ("argument --node-rank: invalid int value: ''",),
        environ={"NODE_RANK": ""},
    ),
    "NODE_RANK is too large": Wrong(
        ("learner", "config.toml", *NODES, "--node-rank=2"),
        ("--node-rank must be 0 to 1, got 2",),
    ),
    "model is missing on one node": Wrong(
        (*SECOND, "model.path=nothing"),
        ("model.path must be a Hugging Face folder, got",),
    ),
    "model is another one on one node": Wrong(
        SERVER,
        ("model.path:", "is not the controller's model", "weights differ"),
        lambda setup: setattr(setup, "model_digest", b"another"),
    ),
    "other release": Wrong(
        SERVER,
        ("slipstream-rl", "the controller's host has 0.0.9: install the same versions"),
        lambda setup: setup.versions.update({"slipstream-rl": "0.0.9"}),
    ),
    "other torch on a learner node": Wrong(
        SECOND,
        ("torch 2.", "the controller's host has 2.11.0"),
        lambda setup: setup.versions.update({"torch": "2.11.0"}),
    ),
    "the same release with another protocol": Wrong(
        SERVER,
        (
            "(protocol ",
            "the controller's host has 0.1.0 (protocol 0a1b2c3d): install the same",
        ),
        lambda setup: setup.versions.update(
            {"slipstream-rl": "0.1.0 (protocol 0a1b2c3d)"}
        ),
    ),
    "clock is behind": Wrong(
        SERVER,
        (
            "the clock of this host is",
            "s behind the controller's, at most 10 s",
            "by NTP",
        ),
        lambda setup: setattr(setup, "unix_time_s", time.time() + 100),
    ),
    "other settings on a learner node": Wrong(
        (*SECOND, "algorithm.group_size=8"),
        ("algorithm.group_size is 8 here and 16 at the controller", "same settings"),
        nothing,
    ),
    "other run on a server": Wrong(
        (*SERVER, "run.name=other"),
        ('run.name is "other" here and "run" at the',),
        nothing,
    ),
    "less room on a server": Wrong(
        (*SERVER, "sampling.max_episode_tokens=8"),
        ("sampling.max_episode_tokens is 8 here, the controller needs 16",),
        nothing,
    ),
    "learner nodes share no folder": Wrong(
        (*SECOND, 'run.dir="other"'),
        (
            "run.dir must be a folder that all nodes of the learner share",
            "other/run/journal",
        ),
        nothing,
    ),
    # Without the rule the proxy would answer, or nobody.
    "proxy for the web": Wrong(
        (*SERVER, "environments.0.reference=absent:Absent"),
        ("environment echo: there is no module 'absent'",),
        nothing,
        environ=dict.fromkeys(
            ("grpc_proxy", "https_proxy", "http_proxy"), "http://127.0.0.1:9"
        ),
    ),
    "run folder cannot be made": Wrong(
        (*FIRST, "run.dir=/proc/runs"),
        ("run.dir is /proc/runs, and /proc cannot be written",),
    ),
}


@dataclass(frozen=True)
class Site:
    """A working folder, in which all commands are called."""

    folder: Path
    address: str

    def contents(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of secrets: `secrets` for a loopback address, `elsewhere` for another, and `late`."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "host").write_text(own_loopback())
    for name, host in (
        ("secrets", (folder / "host").read_text()),
        ("elsewhere", "192.0.2.9"),
    ):
        subprocess.run([MAKE, folder / name, host], check=True, capture_output=True)
    late = shutil.copytree(folder / "secrets", folder / "late")
    names = f"subjectAltName=IP:{(folder / 'host').read_text()}"
    (late / "names").write_text(names)
    ask = [
        "openssl",
        "req",
        "-new",
        "-key",
        "server.key",
        "-subj",
        "/CN=late",
        "-out",
        "request",
    ]
    sign = [
        "openssl",
        "x509",
        "-req",
        "-in",
        "request",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
    ]
    sign += [
        "-set_serial",
        "9",
        "-days",
        "-1",
        "-extfile",
        "names",
        "-out",
        "server.pem",
    ]
    for make in (ask, sign):
        subprocess.run(make, cwd=late, check=True, capture_output=True)
    return folder


@pytest.fixture
def site(tmp_path: Path, secrets: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.chdir(tmp_path)
    for name in ("secrets", "elsewhere", "late"):
        (tmp_path / name).symlink_to(secrets / name)
    host = (secrets / "host").read_text()
    address = f"{host}:{free_port(host)}"
    files = {
        "tls_ca": "ca.pem",
        "tls_certificate": "server.pem",
        "tls_key": "server.key",
    }
    write_config(
        tmp_path,
        empty_model(tmp_path),
        controller={"address": address},
        security={
            "token_file": "secrets/token",
            **{name: f"secrets/{file}" for name, file in files.items()},
        },
    )
    return Site(tmp_path, address)


@contextlib.contextmanager
def answering(
    site: Site, change: Callable[[status_pb2.Setup], object]
) -> Iterator[None]:
    """A server at the controller's address that answers as one with the settings of the site."""
    config = load_config(Path("config.toml"), [*NODES[:2]], apart=True)
    credentials = Credentials.load(config.security)
    setup = describe_setup(config, run_id=RUN_ID, mark=MARK)
    change(setup)
    started = threading.Event()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        server = create_server(credentials)
        status_pb2_grpc.add_StatusServiceServicer_to_server(SetupAnswers(setup), server)
        bind(server, site.address, credentials)
        await server.start()
        started.set()
        await ended.wait()
        await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(LIMIT_S)
        yield
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def start_plainly(
    site: Site, words: Sequence[str], *, before: Sequence[str] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    """A command in a process with limits or mounts of its own."""
    return completed(
        [*before, *COMMAND, *words], cwd=site.folder, env=os.environ | environ
    )


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_launch_is_one_line_before_anything_loads(
    case: str, site: Site
) -> None:
    wrong = WRONG[case]
    before = site.contents()
    with contextlib.ExitStack() as stack:
        if wrong.change is not None:
            stack.enter_context(answering(site, wrong.change))
        if wrong.is_forked:
            environ = os.environ | wrong.environ
            result = COMMANDS.run(
                wrong.words, cwd=site.folder, environ=environ, limit_s=240
            )
        else:
            result = start_plainly(site, wrong.words, **wrong.environ)
    check_refused(result, *wrong.parts)
    assert site.contents() == before


def test_a_port_of_the_ranks_that_is_taken_is_named(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        master = f"127.0.0.1:{occupied.getsockname()[1]}"
        words = [*FIRST, *NODES, f"--master={master}", "--node-rank=0"]
        result = run_command(*words, cwd=site.folder)
    check_refused(
        result,
        f"learner.master: {master} is in use; choose another port, the same on all",
    )


def test_a_first_node_that_is_another_machine_is_named(site: Site) -> None:
    result = run_command(*FIRST, "--master=192.0.2.1:0", cwd=site.folder)
    check_refused(
        result, "learner.master must be an address of this machine", "got 192.0.2.1:0"
    )


def test_a_token_that_nobody_may_read_is_named(site: Site) -> None:
    token = site.folder / "token"
    token.write_text("x" * 40)
    token.chmod(0)
    # Root reads what it may not, by these two rights.
    bounds = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    before = bounds if os.geteuid() == 0 else []
    result = start_plainly(site, [*FIRST, "security.token_file=token"], before=before)
    check_refused(result, "security.token_file: token: Permission denied")


def test_too_few_open_files_are_named(site: Site) -> None:
    limited = ["prlimit", "--nofile=256:256", "--"]
    result = start_plainly(site, FIRST, before=limited)
    check_refused(
        result, "open files: one process may open 256 files: let", "ulimit -Hn"
    )


def test_too_little_address_space_is_named(site: Site) -> None:
    limited = ["prlimit", f"--as={3 << 30}", "--"]
    result = start_plainly(site, FIRST, before=limited)
    check_refused(
        result, "address space: one process may map 3.0 GiB of memory: set ulimit -v"
    )


def test_a_full_disk_is_named(site: Site) -> None:
    with small_disk(site.folder / "disk", "size=1m") as disk:
        result = run_command(*FIRST, f'run.dir="{disk}"', cwd=site.folder)
        assert not [*disk.iterdir()]
    check_refused(
        result, "disk: 0.00 GiB are free for", "0.06 GiB must be free: make room, or"
    )


def test_a_full_disk_is_named_before_functions_are_loaded(site: Site) -> None:
    (site.folder / "slow_loss.py").write_text(
        'raise SystemExit("this module was loaded")\n'
    )
    loss = "algorithm.loss=slow_loss:loss"
    check_refused(run_command(*FIRST, loss, cwd=site.folder), "this module was loaded")
    with small_disk(site.folder / "disk", "size=1m") as disk:
        result = run_command(*FIRST, loss, f'run.dir="{disk}"', cwd=site.folder)
    check_refused(
        result, "disk: 0.00 GiB are free for", "0.06 GiB must be free: make room, or"
    )


def test_shared_memory_that_is_too_small_for_gpus_is_named(site, monkeypatch):
    scene = Scene(load_config(Path("config.toml")), CONTROLLER)
    monkeypatch.setattr(machine, "uses_gpus", lambda: True)
    with small_disk(site.folder / "shm", "size=64m") as shm:
        monkeypatch.setattr(machine, "SHARED_MEMORY", shm)
        with pytest.raises(
            ConfigError, match=r"^shared memory: 0\.1 GiB are free in .*: give 1"
        ):
            asyncio.run(require(scene, Stage.PLACE))


def test_the_doctor_of_a_role_needs_settings(site: Site) -> None:
    result = run_command("doctor", "--role=rollout-server", cwd=site.folder)
    check_refused(result, "--role rollout-server needs a CONFIG.toml")
