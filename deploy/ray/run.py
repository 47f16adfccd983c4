"""Runs the learner and the rollout servers of a run on a Ray cluster that exists. Yours to edit.

    python deploy/ray/run.py run.toml [section.name=value ...]     with RAY_ADDRESS
    ray job submit --address URL -- sh -c "cd $PWD && exec python deploy/ray/run.py run.toml"
    slipstream stop --controller ...           ends the run in order; the same command resumes it

Call it in the folder that all nodes share. `ray job stop` ends all at once: what was not written by
then is trained again. A placement group holds the learner's nodes. Each rollout server is an actor
outside of it, which Ray starts again elsewhere when its node dies.
"""

import os
import signal
import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# learner.world_size / learner.ranks_per_node, and rollout_server.count.
NODES = 1
SERVERS = 1
# What a node and a server need: a processor for each rank or worker, and one more.
LEARNER_NEEDS = {"CPU": 2, "GPU": 0}
SERVER_NEEDS = {"num_cpus": 2, "num_gpus": 0}
CONTROLLER_PORT = 7070
MASTER_PORT = 29500
# Files of make_certificates.sh, whose certificate names the nodes as Ray does: by address.
SECRETS = ["security.tls_ca=secrets/ca.pem", "security.token_file=secrets/token"]
CONTROLLER_SECRETS = [
    "security.tls_certificate=secrets/server.pem",
    "security.tls_key=secrets/server.key",
]
# Seconds that a process has to end in order: a step and a checkpoint; a drain and the engine.
LEARNER_GRACE_S = 600
SERVER_GRACE_S = 35
# Servers start with the learner, which may prove its algorithm before it listens.
CONNECT_TIMEOUT_S = 3600
MOST_STARTS = 20
# The folder that all nodes share. Each node finds `slipstream` in its PATH.
FOLDER = os.getcwd()


@ray.remote(max_concurrency=2)
class Instance:
    """A learner's node or a rollout server: the process of its command, which ends with it."""

    process = None
    is_ending = False

    def address(self):
        return ray.util.get_node_ip_address()

    def run(self, command):
        below = [sys.executable, "-c", BELOW, str(os.getpid())]
        self.process = subprocess.Popen([*below, *command], cwd=FOLDER)
        return self.process.wait()

    def serve(self, command):
        """Starts a server again that ended by an error; returns the code of the last one."""
        for _ in range(MOST_STARTS):
            code = self.run(command)
            if code in (0, 2) or self.is_ending:
                break
            time.sleep(5)
        return code

    def end(self, grace_s):
        self.is_ending = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.process.kill()


# The command ends with the actor, even when nobody is there to end it.
BELOW = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def main(config, *settings):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ray.init(address="auto")
    # Nodes of a gang lie on machines of their own.
    group = placement_group([LEARNER_NEEDS] * NODES, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    learners = [
        Instance.options(
            num_cpus=LEARNER_NEEDS["CPU"],
            num_gpus=LEARNER_NEEDS["GPU"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
        ).remote()
        for number in range(NODES)
    ]
    first = ray.get(learners[0].address.remote())
    controller = f"{first}:{CONTROLLER_PORT}"
    print(f"the controller is at {controller}", flush=True)
    learner = ["slipstream", "learner", config, *SECRETS, *CONTROLLER_SECRETS]
    learner += [f"controller.address={controller}", f"--master={first}:{MASTER_PORT}", *settings]
    runs = [
        each.run.remote([*learner, f"--node-rank={number}"]) for number, each in enumerate(learners)
    ]
    servers = [
        Instance.options(**SERVER_NEEDS, max_restarts=-1, max_task_retries=-1).remote()
        for _ in range(SERVERS)
    ]
    server = ["slipstream", "rollout-server", config, *SECRETS, f"--controller={controller}"]
    server += [f"--connect-timeout-s={CONNECT_TIMEOUT_S}", *settings]
    for number, each in enumerate(servers):
        each.serve.remote([*server, f"--server-id=server-{number}"])
    try:
        # A node that ends by an error ends all: the others would wait for it.
        while runs:
            ended, runs = ray.wait(runs, num_returns=1)
            if code := ray.get(ended[0]):
                return code
        return 0
    except ray.exceptions.RayActorError:
        sys.exit("a node of the learner has died: the same command resumes the run")
    finally:
        for instances, grace_s in ((learners, LEARNER_GRACE_S), (servers, SERVER_GRACE_S)):
            ends = [instance.end.remote(grace_s) for instance in instances]
            ray.wait(ends, num_returns=len(ends), timeout=grace_s)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
