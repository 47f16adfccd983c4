"""Docker's command line, for containers, networks and volumes whose names begin with one prefix."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALL_LIMIT_S = 120.0
POLL_S = 0.5
# Kills by number; an image need not have the program `kill`.
KILL = "import os, sys; os.kill(int(sys.argv[1]), 9)"


class Failed(Exception):
    """Something did not happen; the message is one line for the person who reads the test."""


@dataclass(frozen=True)
class Engine:
    """The engine that `docker` reaches. Containers that it makes have `prefix` before their names.

    `image`: the image under test, which also stands in for whatever helper is needed.
    """

    prefix: str
    image: str

    def call(self, *arguments: str, limit_s: float = CALL_LIMIT_S) -> str:
        """Runs `docker` and returns what it prints; Failed with its own last words."""
        return call(["docker", *arguments], limit_s)

    def create_network(self, subnet: str) -> None:
        """Makes a network that nothing leaves, under the prefix."""
        self.call("network", "create", "--internal", "--subnet", subnet, self.prefix)

    def start_host(self, name: str, address: str) -> str:
        """Starts a container whose network and shared memory stand for a host; its name."""
        container = f"{self.prefix}-host-{name}"
        joined = ["--network", self.prefix, "--ip", address, "--hostname", name]
        self.call(
            "run",
            "--detach",
            "--init",
            "--name",
            container,
            *joined,
            "--ipc",
            "shareable",
            "--shm-size",
            "1g",
            self.image,
            "sleep",
            "infinity",
        )
        return container

    def run(self, *command: str, user: str, mounts: dict[Path, str]) -> str:
        """Runs a command in a container of its own with these folders, until it ends."""
        volumes = [
            word for path, place in mounts.items() for word in ("-v", f"{path}:{place}")
        ]
        name = [
            "--rm",
            "--name",
            f"{self.prefix}-command",
            "--network",
            "none",
            "--user",
            user,
        ]
        return self.call("run", *name, *volumes, self.image, *command)

    def kill(self, container: str) -> None:
        """Kills a container from outside, as the kernel does when memory ends.

        `docker kill` would count as a person's wish, after which no restart policy applies.
        """
        pid = str(self.inspect(container)["State"]["Pid"])
        self.call("exec", f"{self.prefix}-killer", "python", "-c", KILL, pid)

    def start_killer(self) -> None:
        """Starts the container that `kill` works from: it sees all processes of this machine."""
        name = ["--name", f"{self.prefix}-killer", "--network", "none", "--user", "0:0"]
        seeing = ["--pid", "host", "--cap-drop", "ALL", "--cap-add", "KILL"]
        self.call("run", "--detach", *name, *seeing, self.image, "sleep", "infinity")

    def inspect(self, container: str) -> dict[str, Any]:
        """What the engine knows of a container."""
        (parsed,) = json.loads(self.call("container", "inspect", container))
        return dict(parsed)

    def is_running(self, container: str) -> bool:
        """Whether a process of the container lives."""
        return bool(self.inspect(container)["State"]["Running"])

    def is_healthy(self, container: str) -> bool:
        """Whether its last health check succeeded."""
        state = self.inspect(container)["State"]
        return bool(state["Running"]) and state["Health"]["Status"] == "healthy"

    def num_restarts(self, container: str) -> int:
        """How often the engine itself has started it again."""
        return int(self.inspect(container)["RestartCount"])

    def exit_code(self, container: str) -> int | None:
        """None while the container runs, or is about to be started again."""
        state = self.inspect(container)["State"]
        return int(state["ExitCode"]) if state["Status"] == "exited" else None

    def containers(self) -> list[str]:
        """The names of all containers of this test, ended ones too."""
        return self._names("ps", "--all", "--format", "{{.Names}}")

    def remove_all(self) -> None:
        """Removes containers, volumes and networks of this test, and nothing else."""
        for container in self.containers():
            call(["docker", "rm", "--force", "--volumes", container], CALL_LIMIT_S)
        for volume in self._names("volume", "ls", "--format", "{{.Name}}"):
            call(["docker", "volume", "rm", volume], CALL_LIMIT_S)
        for network in self._names("network", "ls", "--format", "{{.Name}}"):
            call(["docker", "network", "rm", network], CALL_LIMIT_S)

    def keep_logs(self, folder: Path) -> None:
        """Writes the log of each container, and what the engine knows of it, into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for container in self.containers():
            with (folder / f"{container}.log").open("wb") as log:
                subprocess.run(
                    ["docker", "logs", "--timestamps", container],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    check=False,
                    timeout=CALL_LIMIT_S,
                )
            (folder / f"{container}.json").write_text(
                json.dumps(self.inspect(container), indent=1)
            )

    def _names(self, *command: str) -> list[str]:
        names = self.call(*command, "--filter", f"name={self.prefix}").split()
        return [name for name in names if name.startswith(self.prefix)]


def call(command: Sequence[str], limit_s: float) -> str:
    """Runs a command and returns its standard output; Failed when it does not end well."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise Failed(
            f"`{' '.join(command)}` did not end within {limit_s:g} s"
        ) from None
    if ended.returncode != 0:
        words = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-8:]
        raise Failed(
            f"`{' '.join(command)}` ended with code {ended.returncode}: {' | '.join(words)}"
        )
    return ended.stdout


def wait_for(
    what: str,
    is_so: Callable[[], bool],
    limit_s: float,
    *,
    running: Iterable[Callable[[], bool]] = (),
) -> None:
    """Waits until `is_so`; Failed after `limit_s`, or as soon as one of `running` is not so."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        if not all(runs() for runs in running):
            raise Failed(f"a container ended before this was so: {what}")
        if time.monotonic() > deadline_s:
            raise Failed(f"not within {limit_s:g} s: {what}")
        time.sleep(POLL_S)
