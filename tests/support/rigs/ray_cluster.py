"""Submits the program of deploy/ray to a Ray cluster of several nodes.

`python ray_cluster.py PROGRAM CONFIG FOLDER STEP`, by an interpreter that has Ray. At STEP a node
with a rollout server dies, and once that server has started elsewhere the learner's node; then the
program is submitted again. What `ray job logs` shows of both jobs comes into FOLDER. Ends with 0 if
the first job failed and the second one did not.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster  # type: ignore[import-not-found]

# All nodes start first, two more than the run takes: a daemon ends whose agent takes half a minute
# to load, as beside the engines of a busy machine.
NODES = 5
SERVERS = 2
RAY = Path(sys.executable).with_name("ray")


def main() -> int:
    """Starts the cluster and both jobs; returns 0 when they ended as they should."""
    program = sys.argv[1]
    config = sys.argv[2]
    folder = Path(sys.argv[3])
    run = f"cd {Path.cwd()} && exec {sys.executable} {program} {config}"
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": True}
    )
    nodes = [cluster.add_node(num_cpus=2) for _ in range(NODES)]
    address = f"--address=http://{cluster.head_node.webui_url}"
    deaths = ["rollout-server", "learner"]
    codes = []
    for name in ("first", "second"):
        log = folder / f"{name}.tail"
        submit = [RAY, "job", "submit", address, f"--submission-id={name}"]
        with log.open("wb") as output:
            job = subprocess.Popen(
                [*submit, "--", "sh", "-c", run], stdout=output, stderr=output
            )
        while job.poll() is None:
            text = log.read_text()
            steps = [int(matches) for matches in re.findall(r"step +(\d+)/", text)]
            is_due = {
                "rollout-server": max(steps, default=0) >= int(sys.argv[4]),
                "learner": text.count(" joins ") > SERVERS,
            }
            if deaths and is_due[deaths[0]]:
                words = f"slipstream {deaths.pop(0)}"
                dead = next(node for node in nodes if processes(node, words))
                nodes.remove(dead)
                kill(cluster, dead)
            time.sleep(0.5)
        codes.append(job.returncode)
        with (folder / f"{name}.log").open("wb") as output:
            subprocess.run(
                [RAY, "job", "logs", address, name], stdout=output, check=True
            )
    return int(bool(deaths) or codes[0] == 0 or codes[1] != 0)


def kill(cluster: Any, node: Any) -> None:
    """Ends a node and all below it at once, as a host that loses its power."""
    below = processes(node)
    cluster.remove_node(node, allow_graceful=False)
    for pid in below:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def processes(node: Any, words: str = "") -> list[int]:
    """Returns the processes below the node's daemon whose command line has these words."""
    daemon = node.all_processes["raylet"][0].process.pid
    shown = subprocess.check_output(["ps", "-eo", "pid=,ppid=,args="], text=True)
    rows = [line.split(None, 2) for line in shown.splitlines()]
    below = {str(daemon)}
    # A process that is started later has a higher number, but for numbers that begin anew.
    while more := {pid for pid, parent, _ in rows if parent in below} - below:
        below |= more
    return [int(pid) for pid, _, args in rows if pid in below and words in args]


if __name__ == "__main__":
    sys.exit(main())
