"""A Slurm cluster of several nodes on this machine: real daemons, each in a host's network.

Everything is a child of the test's process and ends with it. Needs root, and Debian's packages
slurm-wlm and munge.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from slipstream.core.machine.process import below_this

from support.rigs import namespaces
from support.rigs.completed import completed
from support.rigs.namespaces import Network, poll

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "srun", "munged")
START_LIMIT_S = 60.0
# Nothing else of this machine hears it: the network is a namespace.
SUBNET = "10.77.0"
# Every node is a half of the machine, whatever it has; a job of deploy/slurm needs two CPUs. A
# requeued job waits until a credential would have expired.
CONFIG = """\
ClusterName=slipstream
SlurmctldHost=head({subnet}.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
# As with the usual proctrack/cgroup, a signal reaches the program that a step has started alone.
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
MpiDefault=none
NodeName=DEFAULT CPUs=2 RealMemory=8000
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=2 PreemptMode=OFF
PartitionName=preemptible Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
"""


def missing() -> str | None:
    """Why no cluster can be made here; None when it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"not installed: {', '.join(absent)}" if absent else namespaces.missing()


def _path() -> str:
    return f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class SlurmCluster:
    """`slurmctld` and a `slurmd` for each node; a context manager."""

    def __init__(
        self, folder: Path, *, nodes: int, environ: Mapping[str, str] = {}
    ) -> None:
        """`folder` has a short path, since sockets lie in it."""
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._network = Network(folder / "hosts", user=0)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._environ = {
            "PATH": _path(),
            "HOME": str(folder),
            "SLURM_CONF": str(folder / "slurm.conf"),
            **environ,
        }

    def __enter__(self) -> Self:
        (self.folder / "state").mkdir(parents=True)
        addresses = {"head": f"{SUBNET}.1"}
        addresses |= {name: f"{SUBNET}.{10 + at}" for at, name in enumerate(self.nodes)}
        lines = [f"{address} {name}\n" for name, address in addresses.items()]
        (self.folder / "names").write_text("127.0.0.1 localhost\n" + "".join(lines))
        nodes = [
            f"NodeName={name} NodeAddr={addresses[name]} Port=17000"
            for name in self.nodes
        ]
        text = CONFIG.format(subnet=SUBNET, folder=self.folder, nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self._network.__enter__()
        for name, address in addresses.items():
            self._network.add_host(name, address)
        munged = ["munged", "--foreground", "--force", f"--key-file={key}"]
        munged += [
            f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munge.pid",
        ]
        munged += [
            f"--seed-file={self.folder}/munge.seed",
            f"--log-file={self.folder}/munge.log",
        ]
        self._start("munged", "head", munged)
        self._start("slurmctld", "head", ["slurmctld", "-D", "-c"])
        for name in self.nodes:
            self.start_node(name)
        self.wait_for_nodes(len(self.nodes))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in [*self.nodes, "slurmctld", "munged"]:
            self.kill(name)
        self._network.__exit__(kind, error, trace)

    def start_node(self, name: str) -> None:
        self._start(name, name, ["slurmd", "-D", "-N", name])

    def wait_for_nodes(self, count: int) -> None:
        """Waits until so many nodes take jobs."""
        for _ in poll(START_LIMIT_S, every_s=0.5):
            shown = self.call(
                "sinfo", "--noheader", "--Node", "--format=%N %T", check=False
            )
            if (
                len({line.split()[0] for line in shown.splitlines() if " idle" in line})
                == count
            ):
                return
        raise TimeoutError(f"nodes of Slurm: {self.call('sinfo', '--Node', '--long')}")

    def kill(self, name: str) -> None:
        """Ends a daemon and all that runs below it at once, as a host that loses its power."""
        daemon = self._daemons.pop(name, None)
        if daemon is None:
            return
        processes = psutil.Process(daemon.pid).children(recursive=True)
        # The daemons of a job's steps are no children of the node's daemon.
        for process in psutil.process_iter(["name"]):
            is_step = process.info["name"].startswith("slurmstepd")
            if is_step and _namespace(process.pid) == _namespace(daemon.pid):
                processes += [process, *process.children(recursive=True)]
        daemon.kill()
        for process in processes:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        daemon.wait()

    def call(self, *command: str, cwd: Path | None = None, check: bool = True) -> str:
        """Runs a command of Slurm on the head node; returns what it prints."""
        ended = completed(
            [*self._enter("head"), *command], env=self._environ, cwd=cwd or self.folder
        )
        if check and ended.returncode:
            raise RuntimeError(f"{' '.join(command)}: {ended.stdout}{ended.stderr}")
        return ended.stdout

    def state(self, job: str) -> str:
        shown = self.call("scontrol", "--oneliner", "show", "job", job, check=False)
        return shown.partition("JobState=")[2].partition(" ")[0]

    def node_of(self, job: str) -> str:
        shown = self.call("squeue", "--noheader", f"--jobs={job}", "--format=%N")
        return shown.strip()

    def _enter(self, host: str) -> list[str]:
        """The words before a command on a host: its network, its name and all hosts' names."""
        pid = self._network.hosts[host].pid
        script = (
            f'mount --bind {self.folder}/names /etc/hosts; hostname {host}; exec "$@"'
        )
        inside = ["unshare", "--mount", "--uts", "sh", "-eu", "-c", script, "sh"]
        return ["nsenter", f"--net=/proc/{pid}/ns/net", *inside]

    def _start(self, name: str, host: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [*below_this(), *self._enter(host), *command],
                env=self._environ,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""
