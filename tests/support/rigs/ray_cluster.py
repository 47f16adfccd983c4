"""Runs the program that `slipstream roles --for ray` writes on a Ray cluster of several nodes.

`python ray_cluster.py PROGRAM LOG STEP`, by an interpreter that has Ray: once LOG shows step STEP,
a node with a rollout server dies. Ends with the code of the program.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster  # type: ignore[import-not-found]

NODES = 4


def main() -> int:
    """Starts the cluster and the program; returns its code."""
    program, log, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=2) for _ in range(NODES)]
    environ = {**os.environ, "RAY_ADDRESS": cluster.address}
    with log.open("wb") as output:
        run = subprocess.Popen(
            [sys.executable, program], env=environ, stdout=output, stderr=subprocess.STDOUT
        )
    is_whole = True
    while run.poll() is None:
        steps = [int(found) for found in re.findall(r"step +(\d+)/", log.read_text())]
        if is_whole and max(steps, default=0) >= step:
            cluster.remove_node(next(filter(has_server, nodes)), allow_graceful=False)
            is_whole = False
        time.sleep(0.5)
    return run.returncode or int(is_whole)


def has_server(node: Any) -> bool:
    """Whether a process below the node's daemon is the command of a rollout server."""
    daemon = node.all_processes["raylet"][0].process.pid
    shown = subprocess.check_output(["ps", "-eo", "pid=,ppid=,args="], text=True)
    rows = [line.split(None, 2) for line in shown.splitlines()]
    below = {str(daemon)}
    # A process that is started later has a higher number, but for numbers that begin anew.
    while more := {pid for pid, parent, _ in rows if parent in below} - below:
        below |= more
    return any(pid in below and "rollout-server" in args for pid, _, args in rows)


if __name__ == "__main__":
    sys.exit(main())
