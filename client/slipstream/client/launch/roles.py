"""Defines the roles of a run: the number of instances, the command and the needs of each role.

`slipstream run` starts all instances on one machine, `slipstream learner` and `slipstream
rollout-server` one instance of one role. `slipstream roles` prints the roles for schedulers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config, address_parts
from slipstream.core.settings.sections import QueueEnd

LEARNER, ROLLOUT_SERVER, QUEUE = "learner", "rollout-server", "queue"
QUEUE_ENDS: tuple[QueueEnd, ...] = ("controller", "rollout_server")
# Seconds in which a learner after SIGTERM ends its step and saves a checkpoint and the model.
LEARNER_GRACE_S = 600.0
# Seconds after `rollout_server.drain_timeout_s` in which a server ends its engine.
SERVER_GRACE_S = 30.0
# Port of the ranks' rendezvous, unless learner.master has one.
MASTER_PORT = 29500
CONTROLLER_PORT = 7070


class Contract(BaseModel):
    """The base class of the printed models; refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Variable(Contract):
    """A value that is known only where an instance runs; ${NAME} stands for it."""

    name: str
    meaning: str
    scope: Literal["run", "instance"] = Field(
        description="run: the same for all instances of all roles; instance: each has its own"
    )


class Port(Contract):
    """An address at which an instance listens."""

    address: str
    callers: str
    protected_by: str


class Secret(Contract):
    """A secret file that only instances of the role may read."""

    name: str = Field(description="as deploy/make_certificates.sh names the file")
    file: str
    setting: str = Field(description="the setting that has its path")
    first_only: bool = Field(False, description="only instance 0 needs it")


class Shared(Contract):
    """A folder that the instances in `among` must share, or have with the same content."""

    path: str
    setting: str
    among: str


class Probe(Contract):
    """A command that ends with 0 if the instance is healthy."""

    command: list[str]
    patience_s: float = Field(description="seconds after the start in which it may fail")


class Program(Contract):
    """A process that an instance starts, and starts again when the process dies."""

    name: str
    module: str
    count: int = Field(1, description="in each instance")
    restarts: int = Field(description="the most starts after the first one, until it gets on")
    first_only: bool = Field(False, description="only instance 0 has it")


class Count(Contract):
    """How many instances a role can have: the usual, the least and the largest number."""

    usual: int = Field(description="as the settings have it")
    least: int
    most: int | None = Field(description="null: as many as one likes")


class Role(Contract):
    """One role, whose instances a scheduler places, starts and ends."""

    name: str
    kind: Literal["gang", "elastic", "single"] = Field(
        description="gang: all instances start and end together; elastic: they come and go at any "
        "time; single: there is one"
    )
    count: Count
    gpus: int = Field(description="of one instance; 0 where the packages compute on CPUs")
    cpus: int = Field(description="the least number for one instance")
    command: list[str]
    variables: list[Variable]
    ports: list[Port]
    secrets: list[Secret]
    health: Probe
    grace_s: float = Field(description="seconds between SIGTERM and SIGKILL")
    restarts: int = Field(description="how often a failed instance should be started again")
    needs: list[str] = Field(description="roles or addresses that must be there")
    shares: list[Shared]
    programs: list[Program]


class Roles(Contract):
    """All roles of a run."""

    run: str
    folder: str = Field(description="the run's folder")
    roles: list[Role]

    def __getitem__(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)


CONTROLLER = Program(
    name="controller", module="slipstream.learner.controller", restarts=5, first_only=True
)
TRAINER = Program(name="trainer-rank", module="slipstream.learner.trainer", restarts=3)
SERVER = Program(name="server", module="slipstream.rollout_server", restarts=5)
WORKER = Program(name="environment-worker", module="slipstream.client.worker", restarts=0)

CONTROLLER_ADDRESS = Variable(
    name="CONTROLLER_ADDRESS",
    meaning="host:port of the controller, on the first node of the learner",
    scope="run",
)
MASTER_ADDRESS = Variable(
    name="MASTER_ADDRESS",
    meaning="host of the learner's first node and a free port there",
    scope="run",
)
NODE_RANK = Variable(name="NODE_RANK", meaning="number of this node, from 0", scope="instance")
SERVER_ID = Variable(
    name="SERVER_ID", meaning="a name that stays the same after a restart", scope="instance"
)


@dataclass(frozen=True)
class Site:
    """The names under which instances find their files, and settings that all of them get."""

    config: str
    settings: tuple[str, ...] = ()
    # Folder with the files of deploy/make_certificates.sh, for what the settings do not name.
    secrets: str = "secrets"


@dataclass(frozen=True)
class Share:
    """The part of a run's roles that one command starts on this machine."""

    ranks: range = range(0)
    servers: int = 0
    node_rank: int = 0

    @property
    def has_controller(self) -> bool:
        """Whether the controller starts on this machine; it starts with the first rank."""
        return 0 in self.ranks


def learner_node(config: Config, node_rank: int | None) -> Share:
    """Returns the share of the roles that one learner node starts.

    Raises ConfigError for a wrong `node_rank`, or if several nodes lack a port in `learner.master`.
    """
    nodes, per_node = learner_nodes(config)
    if node_rank is None:
        if nodes > 1:
            raise ConfigError(
                f"the learner has {nodes} nodes, so each needs a --node-rank, or NODE_RANK in its "
                "environment"
            )
        node_rank = 0
    if not 0 <= node_rank < nodes:
        raise ConfigError(f"--node-rank must be 0 to {nodes - 1}, got {node_rank}")
    if nodes > 1 and not address_parts(config.learner.master)[1]:
        raise ConfigError(
            "learner.master needs a port that all nodes know, got 0: set it, or give --master"
        )
    return Share(range(node_rank * per_node, (node_rank + 1) * per_node), node_rank=node_rank)


def learner_nodes(config: Config) -> tuple[int, int]:
    """Returns the number of the learner's nodes, and the number of trainer ranks on each node."""
    per_node = config.learner.ranks_per_node or config.learner.world_size
    return config.learner.world_size // per_node, per_node


def roles_of(config: Config, site: Site, *, on_gpus: bool) -> Roles:
    """Returns the roles of a run whose instances run on several machines.

    With `on_gpus`, instances ask for GPUs. Raises ConfigError for a Redis queue without
    `queue.redis_url`, and for `security.tls_client_ca`.
    """
    if config.queue.kind == "redis" and config.queue.redis_url is None:
        raise ConfigError(
            "queue.redis_url must be the address of a server that all machines reach, or "
            'queue.kind "grpc": only `slipstream run` starts a queue of its own'
        )
    if config.security.tls_client_ca is not None:
        raise ConfigError(
            "security.tls_client_ca: roles hand out no certificates of callers; leave it out, the "
            "token of its role is what an instance shows"
        )
    roles = [learner_role(config, site, on_gpus=on_gpus), _rollout_server(config, site, on_gpus)]
    return Roles(run=config.run.name, folder=str(config.run_dir), roles=roles)


def learner_role(config: Config, site: Site, *, on_gpus: bool, is_first: bool = True) -> Role:
    """Returns the role of the learner's instances; those after the first have fewer secrets."""
    nodes, per_node = learner_nodes(config)
    secrets = list(_secrets(config, site, "controller"))
    secrets = [secret for secret in secrets if is_first or not secret.first_only]
    command = [
        *("slipstream", "learner", site.config, *site.settings),
        f"controller.address=${{{CONTROLLER_ADDRESS.name}}}",
        *_paths(config, secrets),
        f"--node-rank=${{{NODE_RANK.name}}}",
        f"--master=${{{MASTER_ADDRESS.name}}}",
    ]
    return Role(
        name=LEARNER,
        kind="gang",
        count=Count(usual=nodes, least=nodes, most=nodes),
        gpus=per_node * on_gpus,
        cpus=per_node * max(config.learner.threads, 1) + 1,
        command=command,
        variables=[CONTROLLER_ADDRESS, MASTER_ADDRESS, NODE_RANK],
        ports=[
            Port(
                address=f"${{{CONTROLLER_ADDRESS.name}}}",
                callers="rollout servers, trainer ranks, clients; on instance 0",
                protected_by="TLS and token",
            ),
            Port(
                address=f"${{{MASTER_ADDRESS.name}}}",
                callers="trainer ranks; on instance 0",
                protected_by="nothing: a network of trusted hosts",
            ),
        ],
        secrets=secrets,
        health=Probe(command=_status(secrets), patience_s=120),
        grace_s=LEARNER_GRACE_S,
        restarts=0,
        needs=_needs(config),
        shares=[
            _model(config),
            Shared(path=str(config.run_dir), setting="run.dir", among="instances of this role"),
        ],
        programs=[CONTROLLER, TRAINER.model_copy(update={"count": per_node})],
    )


def _rollout_server(config: Config, site: Site, on_gpus: bool) -> Role:
    server = config.rollout_server
    secrets = list(_secrets(config, site, "rollout_server"))
    played = (*config.environments, *config.evaluations)
    workers = sum(environment.num_workers for environment in played)
    return Role(
        name=ROLLOUT_SERVER,
        kind="elastic",
        count=Count(usual=server.count, least=1, most=None),
        gpus=server.tensor_parallel_size * on_gpus,
        cpus=max(server.threads, 1) * server.tensor_parallel_size + 1,
        command=[
            *("slipstream", "rollout-server", site.config, *site.settings),
            *_paths(config, secrets),
            f"--controller=${{{CONTROLLER_ADDRESS.name}}}",
            f"--server-id=${{{SERVER_ID.name}}}",
        ],
        variables=[CONTROLLER_ADDRESS, SERVER_ID],
        ports=[],
        secrets=secrets,
        health=Probe(
            command=[*_status(secrets), f"--server-id=${{{SERVER_ID.name}}}"],
            patience_s=server.start_timeout_s,
        ),
        grace_s=server_grace_s(config),
        restarts=20,
        needs=[LEARNER, *_needs(config)],
        shares=[_model(config)],
        programs=[SERVER, WORKER.model_copy(update={"count": workers})],
    )


def _secrets(config: Config, site: Site, end: QueueEnd) -> Iterator[Secret]:
    """Yields the secrets of the role at `end` of the queue.

    Files that the settings do not name are in the folder of `site`.
    """
    wanted = [("tls_ca", "ca.pem", False), ("token_file", "token", False)]
    if end == "controller":
        wanted += [("tls_certificate", "server.pem", True), ("tls_key", "server.key", True)]
    for setting, name, first_only in wanted:
        file = str(getattr(config.security, setting) or f"{site.secrets}/{name}")
        yield Secret(name=name, file=file, setting=f"security.{setting}", first_only=first_only)
    user = config.queue.user_of(end)
    if user is not None:
        yield Secret(
            name=f"redis_{end.removesuffix('_server')}_password",
            file=str(user.password_file),
            setting=f"queue.{end}.password_file",
            first_only=end == "controller",
        )


def _paths(config: Config, secrets: list[Secret]) -> Iterator[str]:
    """Yields overrides with the secrets' paths, and with the queue user of each password file."""
    for secret in secrets:
        yield f"{secret.setting}={secret.file}"
        for end in QUEUE_ENDS:
            user = config.queue.user_of(end)
            if user is not None and secret.setting == f"queue.{end}.password_file":
                yield f"queue.{end}.user={user.user}"


def _status(secrets: list[Secret]) -> list[str]:
    """Returns the command that asks the controller for the status of the run."""
    files = {secret.setting: secret.file for secret in secrets}
    return [
        *("slipstream", "status", f"--controller=${{{CONTROLLER_ADDRESS.name}}}"),
        f"--token-file={files['security.token_file']}",
        f"--tls-ca={files['security.tls_ca']}",
    ]


def _model(config: Config) -> Shared:
    return Shared(path=str(config.model.path), setting="model.path", among="all, or equal copies")


def _needs(config: Config) -> list[str]:
    """Returns the servers that the run does not start: the queue, and the reference's address."""
    reference = config.reference
    addresses = [config.queue.redis_url and QUEUE, reference and reference.server]
    return [str(address) for address in addresses if address]


def server_grace_s(config: Config) -> float:
    """Returns the seconds that a rollout server has to drain and end its engine."""
    return config.rollout_server.drain_timeout_s + SERVER_GRACE_S


def controller_port(config: Config) -> int:
    """Returns the port of the controller in the settings, or its usual one if they name none."""
    return address_parts(config.controller.address)[1] or CONTROLLER_PORT


def master_port(config: Config) -> int:
    """Returns the port of the trainer ranks' rendezvous."""
    return address_parts(config.learner.master)[1] or MASTER_PORT
