import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from slipstream.core.configuration.reply_ends import ReplyEnds
from slipstream.core.settings.config import Config
from slipstream.core.types import ServerId, Trajectory
from slipstream.learner.trainer.tiny_model import make_tokenizer
from slipstream.rollout_server.episodes.play import ServedModel
from slipstream.rollout_server.episodes.renderer import Renderer
from slipstream.rollout_server.episodes.worker_gateway import WorkerGateway
from slipstream.rollout_server.service import RolloutServer
from slipstream.rollout_server.vllm.agent_services import AgentServices
from slipstream.v1 import environment_pb2 as env_pb
from support.fakes.fake_engine import FakeEngine
from support.fakes.fake_fleet import Connection, FakeFleet
from support.fakes.small_configs import small_config
from support.rigs.waiting import LIMIT_S


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(tokenizer_folder: Path) -> Renderer:
    return Renderer(tokenizer_folder, ends=ReplyEnds(model=(2,), template=(30,)))


@pytest.fixture
def config(tokenizer_folder: Path, tmp_path: Path) -> Config:
    return small_config(
        run={"dir": str(tmp_path)},
        model={"path": str(tokenizer_folder), "dtype": "float32"},
        algorithm={"group_size": 4, "groups_per_step": 1},
        sampling={"max_episode_tokens": 32, "max_turns": 4},
        rollout_server={"max_episodes": 8, "drain_timeout_s": 0.2},
    )


@dataclass
class Server:
    """A server in this process, with an engine that has no model."""

    fleet: FakeFleet
    engine: FakeEngine
    stop: asyncio.Event
    task: asyncio.Task[None]
    gateway: WorkerGateway

    async def join(self, *, step: int | None = 5) -> Connection:
        """The next connection; serving version `step` unless that is None."""
        connection = await self.fleet.joined()
        if step is not None:
            await connection.serve_version(step)
        return connection

    async def leased(self, *, step: int = 5, **lease: object) -> Connection:
        """The next connection, on which group g1 was leased."""
        connection = await self.join(step=step)
        connection.lease("g1", **lease)
        return connection

    async def played(self, count: int = 1, **lease: object) -> list[Trajectory]:
        """The first `count` trajectories of a lease, unless it says otherwise of one member."""
        await self.leased(**{"members": [0]} | lease)
        return await self.fleet.wait_trajectories(count)


StartServer = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def start_server(config: Config, renderer: Renderer, tmp_path: Path) -> StartServer:
    @contextlib.asynccontextmanager
    async def start(config=config, at=None, **fleet_options):
        engine = FakeEngine()
        stop = asyncio.Event()
        async with FakeFleet(**fleet_options) as fleet:
            fleet.client = EchoClient()
            gateway = WorkerGateway(tmp_path / "logs", log_bytes=1 << 20)
            model = ServedModel(
                engine, renderer, AgentServices(None, renderer, config.rollout_server)
            )
            address = at or fleet.address
            server = RolloutServer(
                config, address, ServerId("server-0"), model, gateway
            )
            task = asyncio.create_task(server.run(stop))
            try:
                yield Server(fleet, engine, stop, task, gateway)
                if not task.done():
                    stop.set()
                    await asyncio.wait_for(task, LIMIT_S)
            finally:
                task.cancel()
                await asyncio.wait([task])

    return start


@pytest.fixture
async def server(start_server: StartServer) -> AsyncIterator[Server]:
    """A server with the settings of `config`, which must leave in order after the test."""
    async with start_server() as started:
        yield started


class EchoClient:
    """A client's environment: one prompt, then its number of turns, reward 1 each."""

    def __init__(self, turns: int = 1) -> None:
        self.turns = turns
        self.calls: list[env_pb.WorkerCommand] = []
        self.answer_instead: Callable[
            [env_pb.WorkerCommand], env_pb.WorkerMessage | None
        ] = lambda _: None
        self._steps: dict[str, int] = {}

    def __call__(self, call: object) -> env_pb.WorkerMessage:
        command = call.command
        self.calls.append(command)
        instead = self.answer_instead(command)
        if instead is not None:
            return instead
        match command.WhichOneof("command"):
            case "reset":
                messages = [env_pb.ChatMessage(role="user", content="a b")]
                return env_pb.WorkerMessage(
                    observation=env_pb.Observation(messages=messages)
                )
            case "step":
                key = command.step.episode_key
                self._steps[key] = self._steps.get(key, 0) + 1
                done = self._steps[key] >= self.turns
                messages = (
                    [] if done else [env_pb.ChatMessage(role="user", content="c")]
                )
                verdict = env_pb.Verdict(
                    reward=1.0,
                    done=done,
                    messages=messages,
                    metrics={"turns": self._steps[key]},
                )
                return env_pb.WorkerMessage(verdict=verdict)
        return env_pb.WorkerMessage(pong=env_pb.Pong())
