"""Defines the share of a run that one command starts, and the programs of which a run consists.

`slipstream run` starts all of them on one machine; `slipstream learner` and `slipstream
rollout-server` start one instance each, where a scheduler places it.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config, address_parts
from slipstream.core.settings.sections import QueueEnd

LEARNER = "learner"
QUEUE_ENDS: tuple[QueueEnd, ...] = ("controller", "rollout_server")
# Seconds after `rollout_server.drain_timeout_s` in which a server ends its engine.
SERVER_GRACE_S = 30.0


@dataclass(frozen=True)
class Program:
    """A process of a run, which is started again when it dies."""

    name: str
    module: str
    # The most starts after the first one, until it gets on.
    restarts: int


CONTROLLER = Program("controller", "slipstream.learner.controller", restarts=5)
TRAINER = Program("trainer-rank", "slipstream.learner.trainer", restarts=3)
SERVER = Program("server", "slipstream.rollout_server", restarts=5)
TINKER = Program("tinker", "slipstream.extensions.tinker.front", restarts=5)


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
    """Returns the share of the run that one learner node starts.

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


def server_grace_s(config: Config) -> float:
    """Returns the seconds that a rollout server has to drain and end its engine."""
    return config.rollout_server.drain_timeout_s + SERVER_GRACE_S
