"""Hosts and containers as `namespaces` has them, made by Docker Engine from an image of ours."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.rigs.namespaces import STOP_LIMIT_S, Container, Host, Mount, Network

# The image under test.
IMAGE = os.environ.get("SLIPSTREAM_IMAGE", "")


def docker(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs `docker`."""
    return subprocess.run(
        ["docker", *words], capture_output=True, text=True, timeout=STOP_LIMIT_S, check=check
    )


@dataclass(eq=False)
class DockerContainer(Container):
    """A container of the engine; `process` is the client that waits for it."""

    def init_pid(self) -> int | None:
        shown = docker("inspect", "--format={{.State.Pid}}", self.root.name, check=False).stdout
        return int(shown or 0) or None

    def execute(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return docker("exec", self.root.name, *command, check=False)
        except subprocess.TimeoutExpired:
            # To the kubelet an answer that comes too late is none.
            return subprocess.CompletedProcess(command, 124, "", "")

    def kill(self) -> None:
        docker("rm", "--force", self.root.name, check=False)
        self.process.wait()


class DockerHost(Host):
    """An address of the engine's network, which one container after another has."""

    network = ""

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
        """Starts `command` in the image, with this environment besides the image's own."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("".join(f"{ip} {host}\n" for host, ip in hosts.items()))
        mounts = [*mounts, Mount(folder / "hosts", Path("/etc/hosts"))]
        root = folder / f"{self.network}-{self.folder.name}-{name}"
        words = ["--name", root.name, "--init", "--read-only", "--user", f"{self.user}:{self.user}"]
        words += ["--cap-drop=ALL", "--security-opt=no-new-privileges", "--workdir", working_folder]
        words += ["--network", self.network, "--ip", self.address, "--hostname", self.name]
        words += [f"--env={key}={value}" for key, value in environ.items()]
        for mount in mounts:
            mode = "rw" if mount.writable else "ro"
            words.append(f"--volume={mount.source.resolve()}:{mount.target}:{mode}")
        log_path = folder / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                ["docker", "run", "--rm", *words, IMAGE, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        container = DockerContainer(name, self, process, log_path, root, environ)
        self.containers.append(container)
        return container


class DockerNetwork(Network):
    """A network of the engine that nothing leaves."""

    def __enter__(self) -> DockerNetwork:
        self._name = f"slipstream-{os.getpid()}"
        return self

    def add_host(self, name: str, address: str) -> Host:
        if not self.hosts:
            subnet = f"{address.rpartition('.')[0]}.0/24"
            docker("network", "create", "--internal", "--subnet", subnet, self._name)
            self._stack.callback(docker, "network", "rm", self._name)
        host = DockerHost(name, address, self._folder / name, user=self._user)
        host.network = self._name
        self.hosts[name] = host
        return host
