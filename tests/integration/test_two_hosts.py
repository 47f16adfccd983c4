"""The compose file, carried out on four hosts of one network: a run over TLS with a token.

Commands, environment, mounts and secrets are those that Docker Compose resolves from the env files;
namespaces stand in for hosts and containers, and this checkout for the image.
"""

import ipaddress
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from slipstream.learner.controller.records.journal import read_records
from support.rigs import namespaces
from support.rigs.compose_file import DEPLOY, read_env, resolve, write_env
from support.rigs.namespaces import (
    Container,
    Host,
    Mount,
    Network,
    Socket,
    image_environ,
    poll,
)

MISSING = namespaces.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

# The user as which containers run, without an entry in any passwd file.
USER = 12345
NUM_STEPS = 3
GROUPS_PER_STEP = 4
GROUP_SIZE = 4
RUN_LIMIT_S = 600.0
READY_LIMIT_S = 240.0
# Env file, profile, and what differs from the example.
HOSTS = {
    "learner-0": ("learner-0.env", "learner", {}),
    "learner-1": ("learner-1.env", "learner-node", {}),
    "rollout-0": ("rollout.env", "rollout-server", {}),
    "rollout-1": ("rollout.env", "rollout-server", {"SERVER_ID": "rollout-1"}),
}
# The settings name that of learner-0.
ADDRESSES = dict(
    zip(HOSTS, ("10.0.0.10", "10.0.0.11", "10.0.0.20", "10.0.0.21"), strict=True)
)
# Secrets as the note of make_certificates.sh hands them out.
FILES = {
    "learner": ("ca.pem", "server.pem", "server.key", "token", "redis.acl")
    + ("redis_controller_password", "metrics_token"),
    "learner-node": ("ca.pem", "token"),
    "rollout-server": ("ca.pem", "token", "redis_rollout_password"),
}


# An environment of the user's, in the folder that the compose file mounts for such modules.
ENVIRONMENT = """
import asyncio
from pathlib import Path

from slipstream.environments.echo import Echo


class PatientEcho(Echo):
    async def reset(self, task):
        while not Path(__file__).with_name("go").exists():
            await asyncio.sleep(0.05)
        return super().reset(task)
"""


@dataclass
class Cluster:
    """The hosts of one run and what was seen while it went on."""

    network: Network
    folder: Path
    containers: dict[str, Container] = field(default_factory=dict)
    sockets: dict[str, set[Socket]] = field(default_factory=dict)
    answers: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)
    exit_codes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether a container has: the run needs every one of them to its end."""
        return any(
            container.exit_code is not None for container in self.containers.values()
        )

    def look(self) -> None:
        """Notes what listens at this moment."""
        for name, host in self.network.hosts.items():
            self.sockets.setdefault(name, set()).update(host.listening())

    def logs(self) -> str:
        """The ends of all logs, for a failure's message."""
        paths = [
            *self.folder.glob("hosts/*/*/log"),
            *self.folder.glob("*/runs/**/*.log"),
        ]
        return "\n".join(
            f"--- {path.relative_to(self.folder)}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(paths)
        )


def write_config(path: Path) -> None:
    """The deployed settings with a small task and a few short steps."""
    table = tomllib.loads((DEPLOY / "configs" / "cluster.toml").read_text())
    echo = {"reference": "patient:PatientEcho", "timeout_s": READY_LIMIT_S}
    table["run"]["steps"] = NUM_STEPS
    table["model"]["dtype"] = "float32"
    table["environments"] = [echo | {"name": "echo"}]
    table["evaluations"] = []
    table["algorithm"] = {"group_size": GROUP_SIZE, "groups_per_step": GROUPS_PER_STEP}
    table["sampling"] = {"max_reply_tokens": 4, "max_episode_tokens": 16}
    table["learner"] = {"micro_batch_tokens": 256}
    # The hosts share no file system.
    table["checkpoint"] = {"every_steps": 0}
    table["rollout_server"] = {"max_episodes": 16, "threads": 1, "enforce_eager": True}
    path.write_text(tomli_w.dumps(table))


def prepare_host(name: str, folder: Path, secrets: Path, model: Path) -> dict[str, Any]:
    """Makes the folders of one host as the guide says; the services of its role."""
    example, profile, differences = HOSTS[name]
    places = {
        key: folder / key.partition("_")[0].lower()
        for key in (
            "SECRETS_DIR",
            "MODEL_DIR",
            "ENVIRONMENTS_DIR",
            "RUNS_DIR",
            "QUEUE_DIR",
        )
    }
    for key, place in places.items():
        if key == "MODEL_DIR":
            shutil.copytree(model, place)
        else:
            place.mkdir(parents=True)
    for file in FILES[profile]:
        shutil.copy(secrets / file, places["SECRETS_DIR"])
    (folder / "cache").mkdir()
    (places["ENVIRONMENTS_DIR"] / "patient.py").write_text(ENVIRONMENT)
    if profile == "learner":
        # The learner looks at the first task before anything starts.
        (places["ENVIRONMENTS_DIR"] / "go").touch()
    write_config(folder / "cluster.toml")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)
    variables = read_env(DEPLOY / "env" / example) | differences
    variables |= {key: str(place) for key, place in places.items()}
    variables |= {
        "CONFIG_FILE": str(folder / "cluster.toml"),
        "SLIPSTREAM_USER": f"{USER}:{USER}",
    }
    variables["NETWORK_INTERFACE"] = "eth0"
    env_file = write_env(folder / "host.env", variables)
    services: dict[str, Any] = resolve(env_file, profile, shell={})
    return services


def start(host: Host, name: str, model: dict[str, Any], folder: Path) -> Container:
    """Starts a service as an engine would."""
    service = model["services"][name]
    mounts = [
        Mount(
            Path(volume["source"])
            if volume["type"] == "bind"
            else folder / volume["source"],
            Path(volume["target"]),
            writable=not volume.get("read_only"),
        )
        for volume in service["volumes"]
    ]
    for secret in service["secrets"]:
        source = Path(model["secrets"][secret["source"]]["file"])
        mounts.append(Mount(source, Path("/run/secrets") / Path(secret["target"]).name))
    command = service["command"]
    if name == "redis":
        # The wheel's Valkey has no TLS.
        program = Path(__file__).parents[1] / "support" / "fakes" / "tls_valkey.py"
        mounts.append(Mount(program, Path("/tls_valkey.py")))
        command = ["python", "/tls_valkey.py", *command[1:]]
    settings = {
        k: v for k, v in (service.get("environment") or {}).items() if v is not None
    }
    assert service["user"] == f"{USER}:{USER}"
    return host.run(
        name,
        command,
        environ=image_environ() | settings,
        mounts=mounts,
        working_folder=service.get("working_dir", "/data"),
    )


def healthy(container: Container, service: dict[str, Any]) -> bool:
    """Whether the health check of a service succeeds inside its container."""
    kind, *command = service["healthcheck"]["test"]
    assert kind == "CMD"
    return container.exit_code is None and container.execute(command).returncode == 0


def ask(container: Container, service: dict[str, Any], *, token: str, ca: str) -> Any:
    """`slipstream status` inside a container with other secrets than its own."""
    _, *command = service["healthcheck"]["test"]
    words = [word for word in command if not word.startswith(("--token", "--tls"))]
    return container.execute([*words, f"--token-file={token}", f"--tls-ca={ca}"])


def make_foreign_secrets(folder: Path) -> None:
    """The token and the authority of another run."""
    make = DEPLOY / "make_certificates.sh"
    subprocess.run(
        [make, folder / "foreign", "10.0.0.10"], check=True, capture_output=True
    )
    for file in ("token", "ca.pem"):
        place = folder / "environments" / f"foreign-{file}"
        shutil.copy(folder / "foreign" / file, place)
        os.chown(place, USER, USER)


def servers_serving(learner: Container, service: dict[str, Any]) -> set[str]:
    """The rollout servers that have weights, as the controller tells it."""
    _, *command = service["healthcheck"]["test"]
    answer = learner.execute([*command, "--json"])
    if answer.returncode != 0:
        return set()
    servers = json.loads(answer.stdout)["servers"]
    return {server["server_id"] for server in servers if server["state"] == "serving"}


def look_inside(cluster: Cluster, models: dict[str, dict[str, Any]]) -> None:
    """What a container with the least secrets sees, and whether its health check succeeds."""
    rollout = cluster.containers["rollout-0"]
    service = models["rollout-0"]["services"]["rollout-server"]
    for what, command in {
        "secrets": ["ls", "/run/secrets"],
        "outside": ["ls", str(cluster.folder)],
        "write": ["touch", "/environments/file", "/file"],
        "health": service["healthcheck"]["test"][1:],
    }.items():
        cluster.answers[what] = rollout.execute(command)


def carry_out(cluster: Cluster, models: dict[str, dict[str, Any]]) -> None:
    """The run from the first container to the last exit."""
    hosts = cluster.network.hosts
    names = {"learner": "learner-0", "redis": "learner-0", "learner-node": "learner-1"}
    started = time.monotonic()
    for service in ("redis", "learner", "learner-node"):
        host = names[service]
        folder = cluster.folder / host
        cluster.containers[service] = start(hosts[host], service, models[host], folder)
    for host in ("rollout-0", "rollout-1"):
        folder = cluster.folder / host
        cluster.containers[host] = start(
            hosts[host], "rollout-server", models[host], folder
        )
    learner = cluster.containers["learner"]
    service = models["learner-0"]["services"]["learner"]
    for _ in poll(READY_LIMIT_S, every_s=1.0):
        if healthy(learner, service) or cluster.has_ended:
            break
    run = {"token": "/run/secrets/token", "ca": "/run/secrets/tls_ca"}
    foreign = {
        "token": "/environments/foreign-token",
        "ca": "/environments/foreign-ca.pem",
    }
    for what, secrets in {
        "right": run,
        "wrong token": run | {"token": foreign["token"]},
        "wrong authority": run | {"ca": foreign["ca"]},
    }.items():
        if learner.exit_code is None:
            cluster.answers[what] = ask(learner, service, **secrets)
    for _ in poll(READY_LIMIT_S, every_s=1.0):
        cluster.look()
        if cluster.has_ended or len(servers_serving(learner, service)) == 2:
            break
    look_inside(cluster, models)
    for host in ("rollout-0", "rollout-1"):
        (cluster.folder / host / "environments" / "go").touch()
    for _ in poll(RUN_LIMIT_S, every_s=0.2):
        cluster.look()
        if cluster.has_ended:
            break
    cluster.seconds = time.monotonic() - started
    for name in ("learner", "learner-node", "rollout-0", "rollout-1", "redis"):
        container = cluster.containers[name]
        for _ in poll(90.0 if name != "redis" else 0.0):
            if container.exit_code is not None:
                break
        cluster.exit_codes[name] = container.stop()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Short, because sockets lie in it, and readable for the containers' user.
    folder = Path(tempfile.mkdtemp(prefix="slipstream-hosts-"))
    folder.chmod(0o755)
    try:
        make_model = [
            sys.executable,
            "-m",
            "slipstream.learner.trainer.tiny_model",
            folder / "model",
        ]
        subprocess.run(make_model, check=True, capture_output=True)
        make_certificates = [
            DEPLOY / "make_certificates.sh",
            folder / "secrets",
            "10.0.0.10",
        ]
        subprocess.run(make_certificates, check=True, capture_output=True)
        with Network(folder / "hosts", user=USER) as network:
            models = {}
            for name in HOSTS:
                models[name] = prepare_host(
                    name, folder / name, folder / "secrets", folder / "model"
                )
                network.add_host(name, ADDRESSES[name])
            make_foreign_secrets(folder / "learner-0")
            cluster = Cluster(network, folder)
            carry_out(cluster, models)
            print(f"the run took {cluster.seconds:.0f} s")
            for name, sockets in sorted(cluster.sockets.items()):
                print(name, sorted((s.program, s.address, s.port) for s in sockets))
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def summary(cluster: Cluster) -> dict[str, Any]:
    path = cluster.folder / "learner-0" / "runs" / "first" / "summary.json"
    assert path.exists(), cluster.logs()
    parsed: dict[str, Any] = json.loads(path.read_text())
    return parsed


def test_every_container_ends_in_order(cluster: Cluster) -> None:
    assert set(cluster.exit_codes.values()) == {0}, (
        f"{cluster.exit_codes}\n{cluster.logs()}"
    )


def test_all_steps_are_trained_and_no_token_is_missing(summary: dict[str, Any]) -> None:
    assert summary["steps"] == NUM_STEPS
    assert summary["ledger"]["difference"] == 0
    assert summary["ledger"]["trained"] > 0


def test_both_learner_hosts_train(cluster: Cluster) -> None:
    places = {"learner-0": 0, "learner-1": 1}
    logs = {
        host: cluster.folder
        / host
        / "runs"
        / "first"
        / "logs"
        / f"trainer-rank-{rank}.log"
        for host, rank in places.items()
    }
    assert all(path.exists() for path in logs.values())
    assert "on cpu, 2 ranks: tp 1, pp 1, cp 1, dp 2" in logs["learner-0"].read_text()
    message = (
        cluster.folder / "hosts" / "learner-1" / "learner-node" / "log"
    ).read_text()
    assert "ranks 1 to 1 of 2 meet the others at 10.0.0.10:29500, within" in message


def test_both_rollout_servers_have_a_share(
    cluster: Cluster, summary: dict[str, Any]
) -> None:
    records = read_records(cluster.folder / "learner-0" / "runs" / "first" / "journal")
    leases = [record for record in records if record["kind"] == "lease"]
    assert len(leases) == NUM_STEPS * GROUPS_PER_STEP
    assert {lease["server"] for lease in leases} == {"rollout-0", "rollout-1"}
    assert summary["publishes"] >= NUM_STEPS


def test_trajectories_come_by_the_queue(
    cluster: Cluster, summary: dict[str, Any]
) -> None:
    logs = list((cluster.folder / "learner-0" / "queue").rglob("*.aof"))
    written = b"".join(path.read_bytes() for path in logs).lower()
    num_trajectories = NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE
    assert written.count(b"\r\nxadd\r\n") >= num_trajectories
    assert written.count(b"\r\nxdel\r\n") >= 1


def test_only_the_right_token_and_authority_are_answered(cluster: Cluster) -> None:
    answers = cluster.answers
    assert answers["right"].returncode == 0, answers["right"].stderr
    assert "run first-" in answers["right"].stdout
    assert answers["wrong token"].returncode == 2
    assert "the token is missing or wrong" in answers["wrong token"].stderr
    assert answers["wrong authority"].returncode == 2
    for what in ("wrong token", "wrong authority"):
        assert answers[what].stdout == ""


def test_containers_see_what_is_mounted_and_no_more(cluster: Cluster) -> None:
    answers = cluster.answers
    assert answers["secrets"].stdout.split() == [
        "redis_rollout_password",
        "tls_ca",
        "token",
    ]
    assert "No such file" in answers["outside"].stderr
    assert answers["write"].stderr.count("Read-only file system") == 2


def test_the_health_check_of_a_rollout_server_succeeds(cluster: Cluster) -> None:
    assert cluster.answers["health"].returncode == 0, cluster.answers["health"].stderr


def test_nothing_listens_on_all_addresses(cluster: Cluster) -> None:
    everywhere = [
        (name, socket)
        for name, sockets in cluster.sockets.items()
        for socket in sockets
        if socket.address == "*" or ipaddress.ip_address(socket.address).is_unspecified
    ]
    assert not everywhere
    assert {"10.0.0.10:7070", "10.0.0.10:6380", "10.0.0.10:29500"} <= {
        f"{socket.address.removeprefix('::ffff:')}:{socket.port}"
        for socket in cluster.sockets["learner-0"]
    }


def test_rollout_servers_open_no_port_to_others_but_that_of_the_weights(
    cluster: Cluster,
) -> None:
    for name in ("rollout-0", "rollout-1"):
        address = cluster.network.hosts[name].address
        for socket in cluster.sockets[name]:
            assert socket.address in ("127.0.0.1", "::1", address), socket
