"""A client that serves an environment of its own: the product's code in a simulated process."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from slipstream.client import Client, Environment, StepResult
from slipstream.client.episode_host import EpisodeHost, answer_commands
from slipstream.v1 import environment_pb2

from simulation.fleet import NUM_TASKS, verdict_on

TIMEOUT_S = 3.0


@dataclass
class Habits:
    """What clients do that is no error of their own."""

    # Longest time of an answer.
    answer_s: float = 0.1
    # Share of the answers that are sent twice.
    repeated: float = 0.0


class ServedEnvironment(Environment[int]):
    """Judges replies as the environment does that rollout servers host."""

    def __init__(self, habits: Habits, seed: str) -> None:
        self.habits, self.random = habits, random.Random(f"client/{seed}")

    def tasks(self) -> range:
        return range(NUM_TASKS)

    async def reset(self, task: int) -> list[dict[str, str]]:
        await self._work()
        return [{"role": "user", "content": "a"}]

    async def step(self, reply: str) -> StepResult:
        await self._work()
        reward, is_done = verdict_on(reply)
        return StepResult(
            reward, is_done, [] if is_done else [{"role": "user", "content": "b"}]
        )

    async def _work(self) -> None:
        await asyncio.sleep(self.random.uniform(0.0, self.habits.answer_s))


async def serve(address: str, environment: ServedEnvironment) -> None:
    """Serves until the run ends; raises what the client raises."""
    async with Client(address) as client:
        await client.serve(environment, name="served", episodes=8, timeout_s=TIMEOUT_S)


async def answer_often(
    host: EpisodeHost,
    commands: AsyncIterator[environment_pb2.WorkerCommand],
    send: Callable[[environment_pb2.WorkerMessage], Awaitable[None]],
) -> None:
    """Takes the place of `answer_commands`: some answers are sent twice."""
    assert host._tasks is not None
    environment = host._tasks.environment
    assert isinstance(environment, ServedEnvironment)

    async def send_often(message: environment_pb2.WorkerMessage) -> None:
        copy = environment_pb2.WorkerMessage.FromString(message.SerializeToString())
        await send(message)
        if environment.random.random() < environment.habits.repeated:
            await send(copy)

    await answer_commands(host, commands, send_often)
