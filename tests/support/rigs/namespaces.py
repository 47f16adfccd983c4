"""Hosts on one network and containers on them, made of Linux namespaces: by root, without Docker.

Everything hangs on processes that die with the test's own: no namespace, mount or link outlives it,
however it ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from slipstream.core.machine.process import below_this

PROGRAMS = ("ip", "nsenter", "unshare", "setpriv", "chroot", "ss")
DEVICES = ("null", "zero", "full", "random", "urandom")
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/nsswitch.conf", "/etc/localtime")
# The kernel forgets whom to die with when a process changes its user: this one stays root.
INIT = """
{start} "$@" &
child=$!
trap 'kill -TERM $child' TERM
code=0
while kill -0 $child 2> /dev/null; do
    wait $child && code=0 || code=$?
done
exit $code
"""
SYSTEM_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
START_LIMIT_S = 10.0
STOP_LIMIT_S = 60.0


def missing() -> str | None:
    """Why namespaces cannot be made here; None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], check=False
    )
    return "namespaces are not allowed here" if tried.returncode else None


@dataclass(frozen=True)
class Mount:
    """A file or folder of the host that a container sees under another name."""

    source: Path
    target: Path
    writable: bool = False


@dataclass(frozen=True)
class Socket:
    """Something that listens."""

    address: str
    port: int
    program: str


@dataclass(eq=False)
class Container:
    """One program with a root, a process tree and a host's network of its own."""

    name: str
    host: Host
    process: subprocess.Popen[bytes]
    log_path: Path
    root: Path
    environ: Mapping[str, str]

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def init_pid(self) -> int | None:
        """The first of its processes, as this machine counts them; it passes signals on."""
        return next((p.pid for p in children(self.process.pid)), None)

    def program_pid(self) -> int | None:
        """The command itself; None before it has its own root, and when it has ended."""
        for process in children(self.init_pid()):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/root") == str(self.root):
                    return process.pid
        return None

    def execute(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Runs one more command inside, as a health check does; code 125 when nothing runs."""
        pid = self.program_pid()
        if pid is None:
            return subprocess.CompletedProcess(
                command, 125, "", f"{self.name} is not running"
            )
        enter = ["nsenter", f"--target={pid}", "--mount", "--net", "--pid", "--uts"]
        enter += ["--root", "--wd"]
        return subprocess.run(
            [
                *enter,
                *as_user(self.host.user),
                "env",
                *variables(self.environ),
                *command,
            ],
            env=SYSTEM_ENVIRON,
            capture_output=True,
            text=True,
            timeout=STOP_LIMIT_S,
            check=False,
        )

    def stop(self) -> int:
        """Ends it as `docker stop` does; its exit code."""
        if self.exit_code is None:
            pid = self.init_pid()
            if pid is not None:
                os.kill(pid, signal.SIGTERM)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.wait()

    def kill(self) -> None:
        """Ends it and everything in it at once."""
        self.process.kill()
        self.process.wait()


class Host:
    """A network namespace with one address; its containers see what they are given and no more."""

    def __init__(self, name: str, address: str, folder: Path, *, user: int) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self.user = user
        self.pid = 0
        self.containers: list[Container] = []

    def run(
        self,
        name: str,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        mounts: Sequence[Mount],
        working_folder: str,
        hosts: Mapping[str, str] = {},
    ) -> Container:
        """Starts `command` with exactly this environment."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        script = folder / "start.sh"
        # Debian sets a host up like this: its own name is an address that no other host reaches.
        names = {"localhost": "127.0.0.1", self.name: "127.0.1.1", **hosts}
        (folder / "hosts").write_text(
            "".join(f"{ip} {host}\n" for host, ip in names.items())
        )
        mounts = [*mounts, Mount(folder / "hosts", Path("/etc/hosts"))]
        enter = ["chroot", str(folder / "root"), *as_user(self.user)]
        start = shlex.join(
            [*enter, "env", f"--chdir={working_folder}", *variables(environ)]
        )
        script.write_text(
            root_script(folder / "root", mounts, self.name) + INIT.format(start=start)
        )
        log_path = folder / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [
                    *below_this(),
                    "nsenter",
                    f"--net=/proc/{self.pid}/ns/net",
                    "unshare",
                    "--mount",
                    "--uts",
                    "--pid",
                    "--fork",
                    "--kill-child",
                    "sh",
                    "-eu",
                    str(script),
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=SYSTEM_ENVIRON,
                start_new_session=True,
            )
        container = Container(name, self, process, log_path, folder / "root", environ)
        self.containers.append(container)
        return container

    def listening(self) -> list[Socket]:
        """All TCP sockets that listen on this host."""
        shown = self._inside(
            "ss", "--listening", "--tcp", "--numeric", "--processes", "--no-header"
        )
        found = []
        for line in shown.splitlines():
            _, _, _, local, _, *rest = line.split()
            address, _, port = local.rpartition(":")
            program = rest[0].partition('"')[2].partition('"')[0] if rest else ""
            found.append(
                Socket(address.strip("[]").partition("%")[0], int(port), program)
            )
        return found

    def _inside(self, *command: str) -> str:
        enter = ["nsenter", f"--net=/proc/{self.pid}/ns/net"]
        ended = subprocess.run(
            [*enter, *command], capture_output=True, text=True, check=True
        )
        return ended.stdout


class Network:
    def __init__(self, folder: Path, *, user: int) -> None:
        """Containers run as `user`, without a single capability."""
        self._folder = folder
        self._user = user
        self._stack = ExitStack()
        self._switch = 0
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Self:
        self._switch = self._keep_namespace()
        in_namespace(self._switch, "ip link add switch type bridge")
        in_namespace(self._switch, "ip link set switch up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in self.hosts.values():
            for container in host.containers:
                container.kill()
        self._stack.close()

    def add_host(self, name: str, address: str) -> Host:
        """A host at `address` of a /24 network."""
        host = Host(name, address, self._folder / name, user=self._user)
        host.pid = self._keep_namespace()
        port = f"port{len(self.hosts)}"
        pair = f"ip link add {port} type veth peer name eth0 netns {host.pid}"
        in_namespace(self._switch, pair)
        in_namespace(self._switch, f"ip link set {port} master switch up")
        in_namespace(host.pid, "ip link set lo up")
        in_namespace(host.pid, f"ip address add {address}/24 dev eth0")
        in_namespace(host.pid, "ip link set eth0 up")
        self.hosts[name] = host
        return host

    def _keep_namespace(self) -> int:
        """A process that holds a new network namespace until the network is closed."""
        process = subprocess.Popen(
            [*below_this(), "unshare", "--net", "sleep", "infinity"]
        )

        def end() -> None:
            process.kill()
            process.wait()

        self._stack.callback(end)
        ours = os.readlink("/proc/self/ns/net")
        for _ in poll(START_LIMIT_S):
            if os.readlink(f"/proc/{process.pid}/ns/net") != ours:
                return process.pid
        raise TimeoutError("no network namespace was made")


def root_script(root: Path, mounts: Sequence[Mount], host_name: str) -> str:
    """A shell script that makes a root folder with the system's programs, `mounts`, no more."""
    system = [
        Mount(Path(p), Path(p))
        for p in (*SYSTEM_FOLDERS, *SYSTEM_FILES)
        if Path(p).exists()
    ]
    # Our Python, its packages and this checkout stand in for the image; the client has a link to
    # the requirements.
    checkout = Path(__file__).parents[3]
    sources = ("protos", "core", "client", "environments", "rollout_server", "learner")
    sources += ("extensions", "requirements")
    image = {
        Path(sys.prefix),
        Path(sys.base_prefix),
        *(checkout / name for name in sources),
    }
    system += [
        Mount(path, path) for path in sorted(image) if not path.is_relative_to("/usr")
    ]
    lines = [
        f"hostname {host_name}",
        f"mkdir -p {root}",
        f"mount -t tmpfs -o mode=755 root {root}",
        f"mkdir -p {root}/proc {root}/sys {root}/dev {root}/tmp {root}/etc",
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /sys {root}/sys",
        f"mount -t tmpfs -o mode=1777 tmp {root}/tmp",
        f"mkdir {root}/dev/shm",
        f"mount -t tmpfs -o mode=1777 shm {root}/dev/shm",
        f"ln -s /proc/self/fd {root}/dev/fd",
    ]
    for device in DEVICES:
        lines += [
            f"touch {root}/dev/{device}",
            f"mount --bind /dev/{device} {root}/dev/{device}",
        ]
    for mount in (*system, *mounts):
        place = f"{root}{mount.target}"
        lines.append(
            f"mkdir -p {place if mount.source.is_dir() else Path(place).parent}"
        )
        if not mount.source.is_dir():
            lines.append(f"touch {place}")
        lines.append(f"mount --bind {mount.source.resolve()} {place}")
        if not mount.writable:
            lines.append(f"mount -o remount,bind,ro {place}")
    lines.append(f"mount -o remount,ro {root}")
    return "".join(f"{line}\n" for line in lines)


def image_environ() -> dict[str, str]:
    """What the last stage of the Dockerfile sets, with our Python in place of the image's."""
    text = (
        (Path(__file__).parents[3] / "deploy" / "cpu.Dockerfile")
        .read_text()
        .rpartition("FROM ")[2]
    )
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", text, flags=re.MULTILINE)
    environ = dict(word.split("=", 1) for word in block.replace("\\\n", " ").split())
    environ["PATH"] = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    return environ


def as_user(user: int) -> list[str]:
    """What precedes a command that runs as `user`, without capabilities and a way to more."""
    return [
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        "--clear-groups",
        "--bounding-set=-all",
        "--no-new-privs",
    ]


def variables(environ: Mapping[str, str]) -> list[str]:
    """The arguments of `env` that set exactly this environment."""
    return [
        "--ignore-environment",
        *(f"{name}={value}" for name, value in environ.items()),
    ]


def children(pid: int | None) -> list[psutil.Process]:
    """The processes that a process started; none when it is gone."""
    if pid is None:
        return []
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children()
    return []


def in_namespace(pid: int, command: str) -> None:
    """Runs a command in the network namespace of a process."""
    subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", *command.split()], check=True
    )


def poll(limit_s: float, *, every_s: float = 0.05) -> Iterator[None]:
    """Yields again and again until `limit_s` has passed."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        yield
        time.sleep(every_s)
