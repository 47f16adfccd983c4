"""Notices groups that are leased again while a finished trajectory of theirs is on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.types import Trajectory, TrajectoryId
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.watch import REJOIN_S

from simulation.virtual_loop import PROCESS, Process

if TYPE_CHECKING:
    from simulation.world import World


class FinishedEpisodes:
    """The trajectories with a reward that servers hold or have sent, and who could know of them.

    A controller knows what a server has put into the queue or names, once that has joined. After a
    restart it waits for the servers of its groups as long as it waits for anything.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._servers: dict[TrajectoryId, Process] = {}
        self._joined_s: dict[ServerKey, float] = {}
        # Time of the newest controller's start.
        self.began_s = 0.0

    def add(self, trajectory: Trajectory) -> None:
        """Notes what the running server is about to send."""
        process = PROCESS.get()
        if trajectory.has_reward and process is not None:
            self._servers[trajectory.trajectory_id] = process

    def lose(self, trajectory_id: TrajectoryId) -> None:
        """Notes that a trajectory is never sent."""
        self._servers.pop(trajectory_id, None)

    def joined(self, key: ServerKey) -> None:
        """Notes that the controller has welcomed a server."""
        self._joined_s[key] = self._world.loop.now_s

    def check(self, group: Group) -> None:
        """Adds a violation for each missing member of a group that has finished elsewhere."""
        world = self._world
        assert world.controller is not None
        books = world.controller.books
        settings = world.config.controller
        until_s = world.loop.now_s - (settings.heartbeat_timeout_s + REJOIN_S)
        for trajectory_id, process in self._servers.items():
            group_id, member, *_ = trajectory_id.split(".")
            if group_id != group.group_id or int(member) not in group.missing:
                continue
            if trajectory_id in books.ledger._seen:
                continue
            if not process.is_alive and trajectory_id not in world.queue.entries:
                continue
            server = process.name.partition("/")[0]
            session = books.fleet.sessions.get(server)
            known_s = self.began_s
            if session is not None:
                known_s = max(known_s, self._joined_s[session.key])
            elif group.awaits != server or group.leased_s:
                # Groups of a server that is lost under this controller are leased at once.
                continue
            if until_s <= known_s:
                world.violations.append(
                    f"{group.group_id} is leased again at {world.loop.now_s:.2f}, and "
                    f"{trajectory_id} of {process.name} is on its way"
                )
