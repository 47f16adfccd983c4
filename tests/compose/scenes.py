"""The runs that are carried out: on one host, and on several whose parts are killed and stopped."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import Failed, wait_for
from hosts import Host, Site, make_host

NUM_STEPS = 20
GROUPS_PER_STEP = 4
# Generous: two cores load two engines and two trainer ranks at once.
READY_LIMIT_S = 600.0
STEP_LIMIT_S = 300.0
END_LIMIT_S = 300.0
RESTART_LIMIT_S = 120.0
STOPPED_EARLY = 128 + 15

_STARTED_S = time.monotonic()


def tell(line: str) -> None:
    """Prints a line with the seconds since the program began."""
    print(f"{time.monotonic() - _STARTED_S:6.0f} s  {line}", flush=True)


@dataclass(frozen=True)
class Run:
    """The run of a scene, as its files on the learner's host show it."""

    folder: Path

    def num_steps(self) -> int:
        """The steps that have been trained."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        steps = [json.loads(line) for line in lines if line.endswith("}")]
        return max(
            (int(entry["step"]) + 1 for entry in steps if "loss" in entry), default=0
        )

    def wait_for_steps(self, num_steps: int, learner: Host) -> None:
        """Waits until `num_steps` steps are trained; the learner must run."""
        container = learner.container("learner")
        wait_for(
            f"{num_steps} steps are trained",
            lambda: self.num_steps() >= num_steps,
            STEP_LIMIT_S,
            running=[lambda: learner.site.engine.is_running(container)],
        )
        tell(f"{self.num_steps()} steps are trained")

    def check_books(self, servers: set[str]) -> None:
        """Compares summary and journal with what a whole run leaves; Failed with what differs."""
        summary = json.loads((self.folder / "summary.json").read_text())
        # Every controller of the run has written a log of its own.
        logs = (self.folder / "journal").glob("journal*.log")
        lines = [line for log in logs for line in log.read_text().splitlines()]
        records = [json.loads(line.partition(" ")[2]) for line in lines]
        trained = [
            group for record in of_kind(records, "batch") for group in record["groups"]
        ]
        leased_to = {record["server"] for record in of_kind(records, "lease")}
        check("steps of the summary", summary["steps"], NUM_STEPS)
        check("difference of the ledger", summary["ledger"]["difference"], 0)
        check("groups that were trained", len(trained), NUM_STEPS * GROUPS_PER_STEP)
        check("groups that were trained twice", len(trained) - len(set(trained)), 0)
        check("servers that had leases", leased_to, servers)
        tell(f"the ledger: {summary['ledger']}")


def of_kind(records: Iterable[dict[str, Any]], kind: str) -> Iterable[dict[str, Any]]:
    """The records of one kind."""
    return (record for record in records if record["kind"] == kind)


def check(what: str, got: object, wanted: object) -> None:
    """Compares; Failed with both."""
    if got != wanted:
        raise Failed(f"{what}: {got}, and it should be {wanted}")


def check_end(host: Host, service: str, wanted: int) -> None:
    """Waits until a container has ended; Failed when its exit code is another than `wanted`."""
    engine = host.site.engine
    container = host.container(service)
    wait_for(
        f"{container} has ended",
        lambda: engine.exit_code(container) is not None,
        END_LIMIT_S,
    )
    check(f"exit code of {container}", engine.exit_code(container), wanted)
    tell(f"{service} on {host.name} has ended with code {wanted}")


def wait_until_healthy(host: Host, *services: str) -> None:
    """Waits until the health checks of a host's containers succeed."""
    engine = host.site.engine
    for service in services:
        container = host.container(service)
        wait_for(
            f"{container} is healthy",
            lambda container=container: engine.is_healthy(container),
            READY_LIMIT_S,
        )
        tell(f"{service} on {host.name} is healthy")


def one_host(site: Site) -> None:
    """Trains on this machine alone, with env/all-in-one.env on ports that are free."""
    ports = free_ports(3)
    variables = {
        "RUN_NAME": "one-host",
        "CONTROLLER_ADDRESS": f"127.0.0.1:{ports[0]}",
        "MASTER_ADDRESS": f"127.0.0.1:{ports[1]}",
        "QUEUE_PORT": str(ports[2]),
    }
    site.prepare("127.0.0.1")
    host = make_host(
        site, "one-host", example="all-in-one.env", profile="all", variables=variables
    )
    host.up()
    tell("one host: all containers are started")
    wait_until_healthy(host, "redis", "learner", "rollout-server")
    check_end(host, "learner", 0)
    check_end(host, "rollout-server", 0)
    Run(site.runs / "one-host").check_books({"server-0"})
    host.compose("down")


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nothing listens on now, and that the kernel gives to nobody."""
    steps: list[int] = []
    for port in random.sample(range(10000, 32768), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            steps.append(port)
    return steps[:count]


class SeveralHosts:
    """Two learner nodes, of which node 0 has controller and queue, and two rollout servers."""

    def __init__(self, site: Site, subnet: str) -> None:
        """`subnet`: the first three numbers of a /24 network that is free on this machine."""
        self._site = site
        self._engine = site.engine
        self._engine.create_network(f"{subnet}.0/24")
        self._engine.start_killer()
        site.prepare(f"{subnet}.10")
        shared = {
            "RUN_NAME": "several-hosts",
            "CONTROLLER_ADDRESS": f"{subnet}.10:7070",
            "MASTER_ADDRESS": f"{subnet}.10:29500",
            "QUEUE_HOST": f"{subnet}.10",
            "NETWORK_INTERFACE": "eth0",
        }

        def make(name: str, example: str, profile: str, number: int) -> Host:
            network = self._engine.start_host(name, f"{subnet}.{number}")
            return make_host(
                site,
                name,
                example=example,
                profile=profile,
                variables={**shared, "SERVER_ID": name},
                network=network,
            )

        self._learners = [
            make("learner-0", "learner-0.env", "learner", 10),
            make("learner-1", "learner-1.env", "learner-node", 11),
        ]
        self._rollouts = [
            make(f"rollout-{number}", "rollout.env", "rollout-server", 20 + number)
            for number in range(2)
        ]
        self._run = Run(site.runs / "several-hosts")

    def carry_out(self) -> None:
        """Trains 20 steps; on the way each part is killed once and the run is stopped once."""
        self._start((*self._learners, *self._rollouts))
        self._kill_rollout_server()
        self._kill_queue()
        self._kill_learner_node()
        self._kill_controller_node()
        self._stop()
        # The rollout servers wait for the learner.
        self._start(self._learners)
        self._finish()

    def _start(self, hosts: Iterable[Host]) -> None:
        # No step is trained before all are there: the run must be long enough for what follows.
        self._hold(held=True)
        for host in hosts:
            host.up()
        tell("several hosts: all containers are started")
        learner = self._learners[0]
        wait_until_healthy(learner, "redis", "learner")
        for host in self._rollouts:
            wait_until_healthy(host, "rollout-server")
        self._hold(held=False)
        self._run.wait_for_steps(self._run.num_steps() + 2, learner)

    def _kill_rollout_server(self) -> None:
        learner = self._learners[0]
        host = self._rollouts[1]
        container = host.container("rollout-server")
        self._engine.kill(container)
        tell("rollout-1: killed")
        self._run.wait_for_steps(self._run.num_steps() + 1, learner)
        self._hold(held=True)
        self._wait_until_restarted(container)
        wait_for(
            "both rollout servers serve",
            lambda: self._serving() == {"rollout-0", "rollout-1"},
            READY_LIMIT_S,
        )
        tell("rollout-1 serves again")
        self._hold(held=False)
        self._run.wait_for_steps(self._run.num_steps() + 1, learner)

    def _kill_queue(self) -> None:
        learner = self._learners[0]
        container = learner.container("redis")
        self._engine.kill(container)
        tell("the queue: killed")
        self._wait_until_restarted(container)
        self._run.wait_for_steps(self._run.num_steps() + 2, learner)

    def _kill_learner_node(self) -> None:
        learner, node = self._learners
        self._engine.kill(node.container("learner-node"))
        tell("learner-1: killed")
        node.up()
        tell("learner-1: started by hand")
        self._run.wait_for_steps(self._run.num_steps() + 2, learner)

    def _kill_controller_node(self) -> None:
        learner = self._learners[0]
        self._engine.kill(learner.container("learner"))
        tell("learner-0, with the controller: killed")
        for host in self._learners:
            host.up()
        tell("both learner nodes: started by hand")
        self._run.wait_for_steps(self._run.num_steps() + 2, learner)

    def _stop(self) -> None:
        learner, node = self._learners
        containers = {
            host.name: host.container("rollout-server") for host in self._rollouts
        }
        restarts = {
            name: self._engine.num_restarts(c) for name, c in containers.items()
        }
        learner.compose("stop", "learner")
        tell(f"stopped in order after {self._run.num_steps()} steps")
        check_end(learner, "learner", STOPPED_EARLY)
        check_end(node, "learner-node", 0)
        for host in self._rollouts:
            self._wait_until_restarted(
                host.container("rollout-server"), restarts[host.name]
            )
        if self._run.num_steps() >= NUM_STEPS - 2:
            raise Failed("the run came to its end before it was stopped")

    def _finish(self) -> None:
        learner, node = self._learners
        check_end(learner, "learner", 0)
        check_end(node, "learner-node", 0)
        for host in self._rollouts:
            check_end(host, "rollout-server", 0)
        self._run.check_books({"rollout-0", "rollout-1"})
        replayed = learner.compose(
            "run",
            "--rm",
            "--no-deps",
            "--no-TTY",
            "learner",
            "slipstream",
            "replay",
            "/runs/several-hosts",
            limit_s=READY_LIMIT_S,
        )
        tell(f"replayed: {replayed.splitlines()[-1]}")

    def _hold(self, *, held: bool) -> None:
        for host in self._rollouts:
            host.hold(held=held)

    def _wait_until_restarted(self, container: str, restarts: int = 0) -> None:
        wait_for(
            f"{container} is started again by the engine",
            lambda: self._engine.num_restarts(container) > restarts,
            RESTART_LIMIT_S,
        )
        tell(f"{container} is started again by the engine")

    def _serving(self) -> set[str]:
        """The rollout servers that serve, as `slipstream status` says it."""
        learner = self._learners[0].container("learner")
        test = self._engine.inspect(learner)["Config"]["Healthcheck"]["Test"]
        status = json.loads(self._engine.call("exec", learner, *test[1:], "--json"))
        return {
            server["server_id"]
            for server in status["servers"]
            if server["state"] == "serving"
        }


def several_hosts(site: Site, subnet: str) -> None:
    """Trains on four hosts of a network that is made for it, with the env files of deploy/env."""
    SeveralHosts(site, subnet).carry_out()
