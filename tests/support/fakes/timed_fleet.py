"""A rollout server and a trainer that compute nothing and take the time that costs say."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
from dataclasses import dataclass

from slipstream.core.types import Status, Trajectory
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2

from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer


@dataclass(frozen=True)
class Costs:
    """Seconds of both fleets, and the lengths of replies: lognormal, half between the tasks.

    There are few tasks, so that each stretch of a run has the same work.
    """

    engine_step_s: float = 0.002
    engine_token_s: float = 0.00025
    training_fixed_s: float = 0.1
    training_token_s: float = 0.00028
    publish_s: float = 0.05
    pause_s: float = 0.03
    heartbeat_s: float = 0.2
    median: float = 60.0
    sigma: float = 0.83
    longest: int = 500
    num_tasks: int = 64

    def slower(self, factor: float) -> Costs:
        """Returns the same costs, each time `factor` times as long."""
        times = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        slow = {name: factor * value for name, value in times.items() if name.endswith("_s")}
        return dataclasses.replace(self, **slow)

    def length(self, task_index: int, member: int) -> int:
        """Tokens of a reply: the same in every run."""
        task = random.Random(task_index).gauss(0, 1)
        own = random.Random(f"{task_index}/{member}").gauss(0, 1)
        value = self.median * math.exp(self.sigma * (task + own) / math.sqrt(2))
        return max(1, min(self.longest, round(value)))


@dataclass
class _Reply:
    left: float
    done: asyncio.Event


class TimedServer(FakeServer):
    """An engine that gives all running replies a token in each of its steps."""

    def __init__(self, address: str, name: str, costs: Costs, *, max_episodes: int) -> None:
        super().__init__(address, name, max_episodes=max_episodes)
        self._costs = costs
        self._replies: list[_Reply] = []
        self._changed = asyncio.Event()
        self._is_paused = False
        self._made = self._steps = self._busy_s = self._paused_s = 0.0
        self._paused_at_s, self._started_s = 0.0, time.monotonic()

    async def _beat(self) -> None:
        engine = asyncio.create_task(self._decode())
        try:
            while True:
                await self.outbox.put(fleet_pb2.ServerMessage(heartbeat=self.report()))
                await asyncio.sleep(self._costs.heartbeat_s)
        finally:
            engine.cancel()

    def report(self) -> fleet_pb2.ServerReport:
        self.generated = max(int(self._made), self.ended)
        report = super().report()
        report.engine_steps, report.open_episodes = int(self._steps), len(self._replies)
        report.busy_s, report.paused_s = self._busy_s, self._paused_s
        report.uptime_s = time.monotonic() - self._started_s
        return report

    async def _decode(self) -> None:
        costs = self._costs
        while True:
            self._changed.clear()
            replies, started_s, paused = list(self._replies), time.monotonic(), self._is_paused
            step_s = costs.engine_step_s + costs.engine_token_s * len(replies)
            # A report must see what was made: the engine looks up in between.
            wait_s = costs.heartbeat_s / 4 if replies else None
            if replies and not paused:
                wait_s = min(wait_s, step_s * min(reply.left for reply in replies))
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            passed_s = time.monotonic() - started_s
            self._busy_s += passed_s if replies and not paused else 0.0
            self._paused_s += passed_s if paused and replies else 0.0
            if paused or not replies:
                continue
            steps = passed_s / step_s
            self._steps += steps
            for reply in replies:
                self._made += min(steps, reply.left)
                reply.left -= steps
                if reply.left <= 0:
                    self._replies.remove(reply)
                    reply.done.set()

    async def _handle(self, message: fleet_pb2.ControllerMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "receive":
            self._is_paused, self._paused_at_s = True, time.monotonic()
            self._changed.set()
            await asyncio.sleep(self._costs.pause_s)
        await super()._handle(message)
        if kind == "commit":
            self._is_paused = False
            self._changed.set()

    async def _load(self, spec) -> None:
        report = fleet_pb2.EnvironmentReport(environment=spec.name, num_tasks=self._costs.num_tasks)
        await self.outbox.put(fleet_pb2.ServerMessage(environment=report))

    async def _say(self, publish_id: str, phase, **fields) -> None:
        if "paused_s" in fields:
            fields["paused_s"] = time.monotonic() - self._paused_at_s
        await super()._say(publish_id, phase, **fields)

    async def _episode(self, lease: fleet_pb2.Lease, member: int) -> None:
        version, started_s = self.version, time.monotonic()
        length = self._costs.length(lease.task_index, member)
        reply = _Reply(float(length), asyncio.Event())
        self._replies.append(reply)
        self._changed.set()
        await reply.done.wait()
        took_s = time.monotonic() - started_s

        def timed(trajectory: Trajectory) -> Trajectory:
            return dataclasses.replace(trajectory, generation_s=took_s)

        self.unfinished.discard((lease.group_id, member))
        # Both are read before the delivery waits for anything.
        self.reply_tokens, self.spoil = length, timed
        await self._deliver(lease, member, 0, version, Status.COMPLETED, random.random())


class TimedTrainer(FakeTrainer):
    """A trainer whose replicas share the tokens of a step."""

    def __init__(self, address: str, costs: Costs, *, replicas: int) -> None:
        super().__init__(address)
        self._costs, self._replicas, self._computing_s = costs, replicas, 0.0

    async def _train(self, header: trainer_pb2.BatchHeader, batch: list[Trajectory]) -> None:
        tokens = sum(len(trajectory.token_ids) for trajectory in batch)
        self._computing_s = self._costs.training_token_s * tokens / self._replicas
        self.step_s = self._costs.training_fixed_s + self._computing_s
        await super()._train(header, batch)

    async def report(self, report: trainer_pb2.StepReport) -> trainer_pb2.StepReceipt:
        report.metrics["forward_backward_s"] = self._computing_s
        return await super().report(report)

    async def _publish(self, order: weights_pb2.PublishOrder) -> None:
        await asyncio.sleep(self._costs.publish_s)
        await super()._publish(order)
