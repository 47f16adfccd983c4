"""Starts the trainer ranks of one node together, and restarts all of them when one dies.

Consumes: the ends of the processes. Produces: restarts. Waits for: a rank that ends. Unblocked by:
the end of a rank. After a restart all ranks resume from the last checkpoint, while the controller
and the rollout servers keep running.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from slipstream.client.launch.children import (
    FIRST_PAUSE_S,
    Child,
    RestartPolicy,
    first_failed,
    start_child,
)
from slipstream.client.launch.placement import Placement
from slipstream.client.launch.preflight import free_port
from slipstream.client.launch.share import TRAINER
from slipstream.core.run_folder import log_path
from slipstream.core.settings.config import Config, address_parts
from slipstream.protocol.access.exposure import RENDEZVOUS_VARIABLE, rendezvous_secret
from slipstream.protocol.access.security import Credentials


@dataclass(frozen=True)
class Milestones:
    """The progress of a run that a restart does not lose, as its controller reports it."""

    # The newest version.
    version: int
    # The newest version with a checkpoint.
    checkpoint: int

    def is_beyond(self, earlier: Milestones) -> bool:
        """Whether the run has gone beyond the milestones `earlier`."""
        return self.version > earlier.version or self.checkpoint > earlier.checkpoint


class TrainerRanks:
    """Starts the ranks, and restarts them until they end or must not start again.

    ranks = TrainerRanks(config, placement, arguments, ranks=range(2), warn=..., milestones=...)
    failed = await ranks.keep()  # None if all ended normally
    await ranks.stop(grace_s)

    The ranks may die `TRAINER.restarts` times between two milestones. Ranks that train the same
    steps again after each death reach no milestone, however long they run.
    """

    def __init__(
        self,
        config: Config,
        placement: Placement,
        arguments: list[str],
        *,
        ranks: range,
        warn: Callable[[str], None],
        milestones: Callable[[], Awaitable[Milestones | None]],
    ) -> None:
        """Takes the `arguments` of every rank, and the function `warn`, which shows a line.

        `milestones` asks the controller, and returns None if no controller answers.
        """
        self._config, self._placement = config, placement
        self._arguments, self._ranks = arguments, ranks
        self._warn, self._milestones = warn, milestones
        self.children: list[Child] = []

    @property
    def has_all(self) -> bool:
        return len(self._ranks) == self._config.learner.world_size

    async def start(self) -> None:
        """Starts all ranks of the node, with the variables that torchrun would set."""
        self.children = []
        gpus = self._placement.learner_environment
        for torchrun in rank_environments(self._config, self._ranks):
            environ = torchrun | gpus
            name = f"{TRAINER.name}-{environ['RANK']}"
            log = log_path(self._config.run_dir, name)
            child = await start_child(
                name, TRAINER.module, self._arguments, log_path=log, environ=environ
            )
            self.children.append(child)

    async def keep(self, *, first_pause_s: float = FIRST_PAUSE_S) -> Child | None:
        """Starts the ranks, and restarts all when one dies; returns None when all ended normally.

        Returns the rank that died if its exit code is final, or if the ranks were restarted too
        often.
        """
        policy = RestartPolicy(TRAINER.restarts, first_pause_s=first_pause_s)
        reached = Milestones(0, 0)
        while True:
            await self.start()
            failed = await first_failed(self.children, fine=(0,))
            if failed is None:
                return None
            for child in self.children:
                # The other ranks wait for the dead one, and resume from the disk.
                child.signal(signal.SIGKILL)
            await asyncio.gather(*(child.process.wait() for child in self.children))
            now = await self._milestones()
            if now is not None and now.is_beyond(reached):
                policy.forgive()
                reached = now
            pause_s = policy.pause_after(failed.process.returncode, age_s=failed.age_s)
            if pause_s is None:
                return failed
            self._warn(
                f"{failed.describe_end()}; the trainer starts again, start {policy.restarts + 1}"
            )
            await asyncio.sleep(pause_s)

    async def stop(self, grace_s: float) -> None:
        """Ends all ranks; kills those that still run after `grace_s`."""
        await asyncio.gather(*(child.stop(grace_s) for child in self.children))


def rank_environments(config: Config, ranks: range) -> list[dict[str, str]]:
    """Returns the environment variables of each rank: torchrun's and the rendezvous secret."""
    learner = config.learner
    host, port = address_parts(learner.master)
    # Random where one node has all ranks, equal on all nodes otherwise.
    secret = secrets.token_hex(16)
    if len(ranks) < learner.world_size:
        secret = rendezvous_secret(Credentials.load(config.security).token, config.run.name)
    shared = {
        "WORLD_SIZE": str(learner.world_size),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port or free_port(host)),
        RENDEZVOUS_VARIABLE: secret,
    }
    if learner.threads:
        shared["OMP_NUM_THREADS"] = str(learner.threads)
    return [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        for local_rank, rank in enumerate(ranks)
    ]
