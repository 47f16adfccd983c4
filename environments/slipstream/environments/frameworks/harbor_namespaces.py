"""A sandbox for Harbor's tasks on machines without a daemon: Linux namespaces alone.

    environment = "slipstream.environments.frameworks.harbor_namespaces:Namespaces"

A sandbox has the programs of its host, which it cannot change, no image, no network and none of the
host's other files. What it writes is in memory and goes with it. Programs in it are not bounded in
memory, nor in number where the worker is root: run the worker where a scheduler bounds it.
"""

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from slipstream.client import relay_inside
from slipstream.core.machine.process import send_signal

START_LIMIT_S = 60.0
# Threads of all programs of a sandbox, where its worker is not root.
MAX_THREADS = 4096
# Bytes of all files of a sandbox, of the end of a command's output, and of files copied out.
ROOT_BYTES = 1 << 30
OUTPUT_BYTES = 16 << 20
COPIED_BYTES = 1 << 30
MAX_COPIED_FILES = 100_000
# Exit status of a command that its time limit ended, as of `timeout`.
LATE = 124
# By this path programs of the host are found; whoever watches from inside sees no more of it.
HOST_PATH = f"{os.defpath}:/usr/sbin:/sbin"
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
OUTER_NAMESPACES = ("--user", "--mount", "--pid", "--ipc", "--uts")
# What root may do in a sandbox, as in Docker's: own and read files of others, become another user.
# A program that could do more could trace the processes by which commands enter.
CAPABILITIES = (
    "-all",
    "+chown",
    "+dac_override",
    "+fowner",
    "+fsetid",
    "+kill",
    "+setgid",
    "+setuid",
    "+setpcap",
    "+net_bind_service",
    "+sys_chroot",
    "+setfcap",
)
CONFINED = ("setpriv", f"--bounding-set={','.join(CAPABILITIES)}", "--inh-caps=-all")
RAISE_LOOPBACK = "import runpy, sys; runpy.run_path(sys.argv[1])['raise_loopback']()"
# Builds the root in memory, leaves the host's, tells that it is up and waits. The arguments are the
# place of the root, its size, and pairs of a file and the place where it is mounted. Programs run
# in a second user namespace, in which nobody can undo a mount of the first, such as one that is
# read-only; a third is refused, and so are cgroup namespaces, whose root would be the worker's own
# group. Its first process ignores CHLD, so that nothing is left of orphans that have ended.
SCRIPT = """
set -e
root=$1 size=$2
shift 2
mount --make-rprivate /
mount -t tmpfs -o "size=$size,mode=755" tmpfs "$root"
cd "$root"
mkdir -p app tests solution logs/agent logs/verifier logs/artifacts tmp root proc dev run etc home
chmod 1777 tmp
for name in usr opt; do
  [ -e "/$name" ] || continue
  mkdir "$name"
  mount --bind "/$name" "$name"
  mount -o remount,bind,ro,nosuid "$name"
done
for name in bin sbin lib lib32 lib64; do
  if [ -L "/$name" ]; then
    ln -s "$(readlink "/$name")" "$name"
  elif [ -e "/$name" ]; then
    mkdir "$name"
    mount --bind "/$name" "$name"
    mount -o remount,bind,ro,nosuid "$name"
  fi
done
mkdir etc/ssl
for name in alternatives ssl/certs ld.so.cache localtime; do
  [ ! -e "/etc/$name" ] || cp -rL "/etc/$name" "etc/$name"
done
echo root:x:0:0:root:/root:/bin/bash > etc/passwd
echo root:x:0: > etc/group
echo 127.0.0.1 localhost > etc/hosts
for name in null zero full random urandom tty; do
  touch "dev/$name"
  mount --bind "/dev/$name" "dev/$name"
done
ln -s /proc/self/fd dev/fd
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs -o size=64m,mode=1777 tmpfs dev/shm
mount -t proc proc proc
echo 1 > proc/sys/user/max_user_namespaces
echo 0 > proc/sys/user/max_cgroup_namespaces
for name in sys irq bus fs; do
  [ -e "proc/$name" ] || continue
  mount --bind "proc/$name" "proc/$name"
  mount -o remount,bind,ro "proc/$name"
done
for name in $HIDDEN; do
  [ ! -e "proc/$name" ] || mount --bind /dev/null "proc/$name"
done
while [ $# -gt 1 ]; do
  mkdir -p ".$(dirname "$2")"
  touch ".$2"
  mount --bind "$1" ".$2"
  shift 2
done
mkdir .host
pivot_root . .host
cd /
umount -l .host
rmdir .host
exec unshare --user --map-root-user --mount --net $CONFINED sh -c '
  wait="sleep infinity"
  ! env --ignore-signal=CHLD true || wait="env --ignore-signal=CHLD $wait"
  echo up
  exec $wait
'
"""
# Files of /proc that tell of the host, or change it, where the worker is root.
HIDDEN = (
    "sysrq-trigger",
    "kcore",
    "kmsg",
    "keys",
    "key-users",
    "timer_list",
    "sched_debug",
    "kpagecount",
    "kpageflags",
    "kpagecgroup",
)


class Namespaces(BaseEnvironment):  # type: ignore[misc]
    """Runs a task in user, mount, network, process, IPC and host-name namespaces of its own.

    Its keeper ends with the worker's thread, also after kill -9, and all of its processes with it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - Harbor's
        super().__init__(*args, **options)
        self._keeper: asyncio.subprocess.Process | None = None
        self._inside = ""

    @staticmethod
    def type() -> str:
        return "namespaces"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        """Harbor's own check of a task's files: a Dockerfile is neither needed nor read."""

    async def start(self, force_build: bool) -> None:  # noqa: ARG002 - nothing is built
        """Starts the sandbox; raises RuntimeError where namespaces cannot be made."""
        mounts: list[str] = []
        for mount in self._host_mounts:
            if mount["type"] != "bind" or not Path(mount["source"]).exists():
                raise RuntimeError(f"namespaces mount files and sockets alone, got {mount}")
            if Path(mount["source"]).is_dir():
                raise RuntimeError(f"namespaces mount no folders, got {mount['source']}")
            mounts += [mount["source"], str(mount["target"])]
        place = Path(self.trial_paths.trial_dir).resolve() / "root"
        place.mkdir(parents=True, exist_ok=True)
        keeper = await asyncio.create_subprocess_exec(
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--map-root-user",
            *OUTER_NAMESPACES,
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            SCRIPT,
            "sh",
            str(place),
            str(ROOT_BYTES),
            *mounts,
            env={
                **VARIABLES,
                "PATH": HOST_PATH,
                "CONFINED": " ".join(CONFINED),
                "HIDDEN": " ".join(HIDDEN),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._keeper = keeper
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await self._enter(keeper)
        except BaseException:
            await self.stop(delete=True)
            raise

    async def _enter(self, keeper: asyncio.subprocess.Process) -> None:
        """Waits until the sandbox is up, and turns its loopback on; raises RuntimeError."""
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        line = await keeper.stdout.readline()
        if line != b"up\n":
            cause = (await keeper.stderr.read()).decode(errors="replace").strip()
            raise RuntimeError(f"the namespaces of a sandbox cannot be made: {cause}")
        children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
        (self._inside,) = children
        # Programs inside may not do it.
        loopback = await asyncio.create_subprocess_exec(
            "nsenter",
            f"--target={self._inside}",
            "--preserve-credentials",
            "--user",
            "--net",
            sys.executable,
            "-I",
            "-c",
            RAISE_LOOPBACK,
            relay_inside.__file__,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await loopback.communicate()
        if loopback.returncode:
            cause = errors.decode(errors="replace").strip()
            raise RuntimeError(f"the loopback of a sandbox cannot be turned on: {cause}")

    async def stop(self, delete: bool) -> None:  # noqa: ARG002 - nothing is left to keep
        """Ends all processes of the sandbox; its files go with them."""
        keeper = self._keeper
        self._keeper = None
        if keeper is not None:
            send_signal(keeper, signal.SIGKILL)
            await keeper.wait()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Runs a command as the only user of the sandbox, root; `user` must be that or None."""
        if user not in (None, "root", 0):
            raise RuntimeError(f"a sandbox of namespaces has root alone, got user {user!r}")
        folder = cwd or self.task_env_config.workdir or "/app"
        script = f"cd {shlex.quote(folder)} || exit\n{command}"
        variables = VARIABLES | (self._merge_env(env) or {})
        with contextlib.ExitStack() as files:
            output = files.enter_context(tempfile.TemporaryFile())
            errors = files.enter_context(tempfile.TemporaryFile())
            status = await self._run(
                ["bash", "-c", script], variables, output, errors=errors, limit_s=timeout_sec
            )
            return ExecResult(stdout=_text(output), stderr=_text(errors), return_code=status)

    async def _run(
        self,
        command: list[str],
        variables: Mapping[str, str],
        output: IO[bytes],
        *,
        errors: IO[bytes] | int = asyncio.subprocess.DEVNULL,
        given: IO[bytes] | int = asyncio.subprocess.DEVNULL,
        limit_s: float | None = None,
    ) -> int:
        """Runs a command inside and returns its exit status; no file grows beyond ROOT_BYTES."""
        if self._keeper is None:
            raise RuntimeError("the sandbox has ended")
        settings = [f"{name}={value}" for name, value in variables.items()]
        process = await asyncio.create_subprocess_exec(
            # Only in the outer namespace of users may a user who is not root enter its others.
            "nsenter",
            f"--target={self._keeper.pid}",
            "--preserve-credentials",
            "--user",
            "--ipc",
            "--uts",
            f"--pid=/proc/{self._inside}/ns/pid",
            "nsenter",
            f"--target={self._inside}",
            "--preserve-credentials",
            "--user",
            "--mount",
            "--net",
            "setsid",
            "prlimit",
            f"--fsize={ROOT_BYTES}",
            f"--nproc={MAX_THREADS}",
            *CONFINED,
            "/usr/bin/env",
            "-i",
            *settings,
            *command,
            env={"PATH": HOST_PATH},
            stdin=given,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            return await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            return LATE
        finally:
            if process.returncode is None:
                _end(process)
                await process.wait()

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = Path(target_path)
        await self._upload(Path(source_path), target.parent, target.name)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._upload(Path(source_dir), Path(target_dir), ".")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        source = Path(source_path)
        target = Path(target_path)
        with tempfile.TemporaryDirectory() as folder:
            await self._download(source.parent, source.name, Path(folder))
            target.parent.mkdir(parents=True, exist_ok=True)
            copied = Path(folder) / source.name
            if not copied.exists():
                raise OSError(f"{source} of a sandbox is no file")
            shutil.move(copied, target)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._download(Path(source_dir), ".", Path(target_dir))

    async def _upload(self, source: Path, folder: Path, name: str) -> None:
        """Copies a file or folder to `name` in `folder` of the sandbox, whose links stay inside."""

        def pack() -> None:
            with tarfile.open(fileobj=archive, mode="w") as writer:
                writer.add(source, name)
            archive.seek(0)

        with tempfile.TemporaryFile() as archive, tempfile.TemporaryFile() as output:
            await asyncio.to_thread(pack)
            unpack = f"mkdir -p {shlex.quote(str(folder))} && tar --no-same-owner -xf - -C "
            command = ["bash", "-c", unpack + shlex.quote(str(folder))]
            if await self._run(command, VARIABLES, output, errors=output, given=archive):
                raise OSError(f"{source} could not be copied to {folder}: {_text(output)}")

    async def _download(self, folder: Path, name: str, target: Path) -> None:
        """Copies `name` in `folder` of the sandbox into `target`.

        What comes may be of an agent's making: raises OSError for too much of it, and leaves out
        links, devices, and files that would lie outside of `target`.
        """

        def unpack() -> None:
            archive.seek(0)
            with tarfile.open(fileobj=archive, mode="r:") as reader:
                members: list[tarfile.TarInfo] = []
                num_bytes = 0
                for member in reader:
                    members.append(member)
                    num_bytes += member.size
                    if num_bytes > COPIED_BYTES or len(members) > MAX_COPIED_FILES:
                        raise OSError(f"{folder / name} of a sandbox is too large to be copied")
                reader.extractall(target, members, filter=_harmless)

        with tempfile.TemporaryFile() as archive, tempfile.TemporaryFile() as errors:
            command = ["tar", "-C", str(folder), "--hard-dereference", "-cf", "-", "--", name]
            if await self._run(command, VARIABLES, archive, errors=errors):
                raise OSError(f"{folder / name} of a sandbox: {_text(errors)}")
            target.mkdir(parents=True, exist_ok=True)
            try:
                await asyncio.to_thread(unpack)
            except tarfile.TarError as error:
                raise OSError(f"{folder / name} of a sandbox: {error}") from error


def _end(entering: asyncio.subprocess.Process) -> None:
    """Ends the command of nsenter with its group, so that nsenter takes its exit code.

    A command whose code nobody takes would keep its namespace from ending.
    """
    place = Path(f"/proc/{entering.pid}/task/{entering.pid}/children")
    with contextlib.suppress(OSError):
        for child in map(int, place.read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            # The child may not lead a group yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            return
    send_signal(entering, signal.SIGKILL)


def _harmless(member: tarfile.TarInfo, place: str) -> tarfile.TarInfo | None:
    if member.issym() or member.islnk():
        return None
    try:
        return tarfile.data_filter(member, place)
    except tarfile.FilterError:
        return None


def _text(file: IO[bytes]) -> str:
    """Returns the end of what a command wrote."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - OUTPUT_BYTES))
    return file.read().decode(errors="replace")
