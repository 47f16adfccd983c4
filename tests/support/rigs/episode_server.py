"""A rollout server in this process whose controller is the test; its engine has a script."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.settings.config import Config
from slipstream.core.types import ServerId, Trajectory
from slipstream.rollout_server.episodes.play import ServedModel
from slipstream.rollout_server.episodes.worker_gateway import WorkerGateway
from slipstream.rollout_server.service import RolloutServer
from slipstream.v1 import environment_pb2, fleet_pb2, trajectory_pb2

from support.fakes.fake_fleet import Connection, FakeFleet
from support.fakes.scripted_engine import ScriptedEngine
from support.rigs.waiting import LIMIT_S

FOLDER = str(Path(__file__).parents[1] / "fakes")
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "max_reply_tokens": 300,
    "max_turns": 100,
    "max_episode_tokens": 1500,
    "max_total_tokens": 4000,
    "max_branches": 8,
}


@dataclass
class EpisodeServer:
    """What the test tells the server, and what came of it."""

    fleet: FakeFleet
    engine: ScriptedEngine
    connection: Connection
    leases: int = 0

    def load(
        self,
        module: str,
        *names: str,
        timeout_s: float = 20.0,
        args_json: str = "{}",
        **order: Any,  # noqa: ANN401
    ) -> None:
        """Orders environments of a module of `support.fakes`."""
        for name in names:
            spec = environment_pb2.EnvironmentSpec(
                name=name,
                reference=f"{module}:{name}",
                args_json=args_json,
                timeout_s=timeout_s,
                num_workers=1,
                search_path=FOLDER,
            )
            self.connection.send(
                environment=fleet_pb2.EnvironmentOrder(spec=spec, **order)
            )

    def lease(
        self,
        environment: str,
        *,
        members: int = 1,
        timeout_s: float = 20.0,
        max_attempts: int = 1,
        values: str = "",
        purpose: int = trajectory_pb2.EPISODE_PURPOSE_TRAINING,
        **sampling: int,
    ) -> str:
        """Leases a group; returns its name."""
        self.leases += 1
        group = f"g{self.leases}"
        self.connection.lease(
            group,
            environment,
            members=list(range(members)),
            sampling=fleet_pb2.SamplingSettings(**SAMPLING | sampling),
            timeout_s=timeout_s,
            max_attempts=max_attempts,
            chat_template_kwargs_json=values,
            purpose=purpose,
        )
        return group

    async def ended(self, group: str, number: int = 1) -> list[Trajectory]:
        """The trajectories of a group, when so many of them have come."""
        while (
            len(members := [t for t in self.fleet.trajectories if t.group_id == group])
            < number
        ):
            await self.fleet.wait_trajectories(len(self.fleet.trajectories) + 1)
        return members

    async def run(self, environment: str, **lease: Any) -> list[Trajectory]:  # noqa: ANN401
        """The trajectories of a new group, when all of them have come."""
        number = lease.get("members", 1) * lease.get("max_attempts", 1)
        return await self.ended(self.lease(environment, **lease), number)

    def samples(self) -> list[tuple[list[int], list[int]]]:
        """The prompt and the reply of each request that the engine has served."""
        return [(sample.prompt, sample.tokens) for sample in self.engine.samples]

    async def check_ledger(self) -> None:
        """The tokens that the engine counted are those of the trajectories."""
        beat = await self.connection.wait_quiet()
        recorded = sum(
            trajectory.num_sampled_tokens for trajectory in self.fleet.trajectories
        )
        assert beat.generated_tokens == beat.ended_tokens == recorded
        assert beat.in_flight_tokens == 0


def recorded(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    """The prompt and the reply of each turn."""
    trajectories = []
    for sequence in trajectory.sequences:
        tokens = trajectory.token_ids[sequence.tokens].tolist()
        end = 0
        lengths = trajectory.run_lengths[sequence.runs]
        for context, sampled in zip(lengths[::2], lengths[1::2], strict=True):
            start = end + context
            end = end + context + sampled
            trajectories.append((tokens[:start], tokens[start:end]))
    return trajectories


@contextlib.asynccontextmanager
async def serving(
    config: Config,
    engine: ScriptedEngine,
    logs: Path,
    *,
    heartbeat_timeout_s: float = 20.0,
) -> AsyncIterator[EpisodeServer]:
    """A server that has joined and serves version 1."""
    engine.version = None
    engine.running.clear()
    stop = asyncio.Event()
    async with FakeFleet(heartbeat_timeout_s=heartbeat_timeout_s) as fleet:
        takes_tools = config.rollout_server.tool_parser is not None
        gateway = WorkerGateway(logs, log_bytes=1 << 20, takes_tools=takes_tools)
        model = ServedModel(engine, engine.renderer, engine.agents)
        program = RolloutServer(config, fleet.address, ServerId("s"), model, gateway)
        task = asyncio.create_task(program.run(stop))
        connection = await fleet.joined()
        await connection.serve_version(1)
        yield EpisodeServer(fleet, engine, connection)
        stop.set()
        await asyncio.wait_for(task, LIMIT_S)
