"""A rollout server without an engine: speaks the real protocol and makes up replies at once."""

import asyncio
import hashlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import numpy as np
from slipstream.core.types import (
    Failure,
    FailureKind,
    GroupId,
    PolicyVersion,
    Purpose,
    ServerId,
    Status,
    Trajectory,
    VersionSpan,
)
from slipstream.protocol.codec import (
    PROTOCOL_VERSION,
    encode_trajectory,
    version_from_pb,
)
from slipstream.protocol.queue.base import Tally, TrajectorySender, seal
from slipstream.protocol.queue.grpc import GrpcSender
from slipstream.protocol.weights.buckets import TensorSpec, layout_from_pb, layout_to_pb
from slipstream.v1 import fleet_pb2, fleet_pb2_grpc, trajectory_pb2, weights_pb2

from support.fakes.named_channel import OPEN, open_named
from support.fakes.plain_trajectory import plain_trajectory

QUEUE_BYTES = 256 << 20
# Log-probabilities that the prompts of three tokens that it makes up score.
PROMPT_LOGPROBS = np.array([-0.5, -0.25], "<f4").tobytes()
LAYOUT = layout_to_pb([TensorSpec("w", "float32", (4, 4))], 1 << 20)

Judge = Callable[[fleet_pb2.Lease, int, int], float | Failure]


def bucket_digests(layout) -> list[bytes]:
    return [
        hashlib.blake2b(str(b).encode()).digest()[:16] for b in layout_from_pb(layout)
    ]


def coin(lease: fleet_pb2.Lease, member: int, attempt: int) -> float:
    return random.Random(f"{lease.group_id}/{member}").random()


class FakeServer:
    """Run it as a task; cancelling it is its death."""

    # Those of its calls.
    credentials = OPEN
    # The time in the engine that its trajectories tell.
    generation_s = 0.0

    def __init__(
        self,
        address: str,
        name: str = "fake",
        *,
        epoch: int | None = None,
        max_episodes: int = 64,
        reply_tokens: int = 5,
        delay_s: float = 0.0,
        judge: Judge = coin,
        failing_environments: tuple[str, ...] = (),
        queue_url: str = "",
        queue_bytes: int = QUEUE_BYTES,
        from_storage: bool = False,
        engine_settings: str = "",
    ) -> None:
        """Trajectories go to the Redis at `queue_url`, or to the controller itself if it is ""."""
        self.address = address
        self.name = name
        self.epoch = epoch if epoch is not None else secrets.randbits(60)
        self.max_episodes = max_episodes
        self.reply_tokens = reply_tokens
        self.delay_s = delay_s
        self.judge = judge
        self.failing_environments = failing_environments
        self.queue_url = queue_url
        self.queue_bytes = queue_bytes
        self.engine_settings = engine_settings
        # Names of the GPUs on which it seems to compute.
        self.gpus: list[str] = []
        # Lets a version be fetched from storage, and what was fetched.
        self.from_storage, self.link, self.fetch_s = from_storage, asyncio.Event(), 0.0
        self.link.set()
        self.fetched: list[str] = []
        self.sender: TrajectorySender | None = None
        # Trajectories that the queue has taken.
        self.delivered: list[tuple[str, bytes]] = []
        # Seals what it delivers; comes with the welcome.
        self.delivery_key = b""
        self.version: PolicyVersion | None = None
        self.loaded_versions: list[PolicyVersion] = []
        self.leases: list[fleet_pb2.Lease] = []
        self.generated = self.ended = self.num_ended = 0
        # Tokens of what the queue has not taken yet.
        self.delivering: dict[str, int] = {}
        # Tokens of the episodes that wait for the gate.
        self.gated = 0
        self.drained = False
        # Whether the run that ordered it to leave may go on, once it has been told.
        self.run_stopped: bool | None = None
        # Set before the task of `run` is cancelled: a dead server delivers nothing more.
        self.killed = False
        # Whether an attempt goes on until it is cancelled.
        self.hangs: Callable[[fleet_pb2.Lease, int, int], bool] = lambda *_: False
        # Lets weights be loaded.
        self.buckets = asyncio.Event()
        self.buckets.set()
        # The change that it makes to a trajectory before it is sent.
        self.spoil: Callable[[Trajectory], Trajectory] = lambda trajectory: trajectory
        # Lets a server that leaves hand back what it has.
        self.departure = asyncio.Event()
        self.departure.set()
        # Whether each rest was to give memory back, and whether one goes on.
        self.rests: list[bool] = []
        self.is_resting = False
        # Group and member of each trajectory without a verdict.
        self.unfinished: set[tuple[str, int]] = set()
        self.running: dict[str, asyncio.Task] = {}
        self.outbox: asyncio.Queue = asyncio.Queue()
        self.welcomed = asyncio.Event()
        self.put_limit_s = 60.0
        self.gate = asyncio.Event()
        self.gate.set()
        # The same for episodes of evaluations alone.
        self.evaluation_gate = asyncio.Event()
        self.evaluation_gate.set()

    async def run(self) -> None:
        named = open_named(self.address, credentials=self.credentials)
        async with named as channel, AsyncExitStack() as self.stack:
            if not self.queue_url:
                sender = GrpcSender(channel, (), self.queue_bytes)
                self.sender = await self.stack.enter_async_context(sender)
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            async with asyncio.TaskGroup() as self.tasks:
                beat = self.tasks.create_task(self._beat())
                async for message in stub.Join(self._messages(), wait_for_ready=True):
                    await self._handle(message)
                beat.cancel()
                for task in self.running.values():
                    task.cancel()

    def report(self) -> fleet_pb2.ServerReport:
        # The sender to Redis is opened after the welcome.
        amounts = self.sender.taken if self.sender else {}
        sent = amounts.get(f"{self.epoch:x}", Tally())
        return fleet_pb2.ServerReport(
            generated_tokens=self.generated,
            ended_tokens=self.ended,
            in_flight_tokens=self.generated - self.ended,
            ended_episodes=self.num_ended,
            delivering=Tally(
                len(self.delivering), sum(self.delivering.values())
            ).to_pb(),
            sent=sent.to_pb(),
        )

    async def _messages(self) -> AsyncIterator[fleet_pb2.ServerMessage]:
        yield fleet_pb2.ServerMessage(
            hello=fleet_pb2.ServerHello(
                server_id=self.name,
                server_epoch=self.epoch,
                protocol_version=PROTOCOL_VERSION,
                max_episodes=self.max_episodes,
                engine_workers=1,
                disabled_features={"drafts": "no drafts here"},
                max_model_len=4096,
                queue_bytes=self.queue_bytes,
                from_storage=self.from_storage,
                place=weights_pb2.Place(gpus=self.gpus),
                engine_settings=self.engine_settings,
            )
        )
        while (message := await self.outbox.get()) is not None:
            yield message

    async def _beat(self) -> None:
        # Like a real server: a message under way beside a refusal may hide its words.
        await self.welcomed.wait()
        while True:
            await self.outbox.put(fleet_pb2.ServerMessage(heartbeat=self.report()))
            await asyncio.sleep(0.1)

    async def _handle(self, message: fleet_pb2.ControllerMessage) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                self.run_id = message.welcome.run_id
                self.welcomed.set()
                self.delivery_key = message.welcome.delivery_key
                if self.queue_url:
                    from slipstream.extensions.redis.queue import RedisSender

                    queue = RedisSender(self.queue_url, self.run_id, self.queue_bytes)
                    self.sender = await self.stack.enter_async_context(queue)
            case "environment" if not message.environment.unload:
                self.tasks.create_task(self._load(message.environment.spec))
            case "lease":
                self.leases.append(message.lease)
                episodes = []
                for member in message.lease.members:
                    self.unfinished.add((message.lease.group_id, member))
                    key = f"{message.lease.group_id}.{member}"
                    task = self.tasks.create_task(self._episode(message.lease, member))
                    self.running[key] = task
                    episodes.append(task)
                self.tasks.create_task(self._close(message.lease.group_id, episodes))
            case "cancel":
                for key, task in self.running.items():
                    if key.startswith(message.cancel.group_id + "."):
                        task.cancel()
            case "prepare" if message.prepare.HasField("stored"):
                self.tasks.create_task(self._fetch(message.prepare))
            case "prepare":
                await self._say(
                    message.prepare.publish_id, fleet_pb2.PUBLISH_PHASE_READY
                )
            case "receive":
                await self.buckets.wait()
                if message.receive.order.communicator.transport == "storage":
                    assert self.fetched, "it was told to load what it has not fetched"
                    self.layout = LAYOUT
                if message.receive.layout.tensors:
                    self.layout = message.receive.layout
                self.digests = bucket_digests(self.layout)
                publish_id = message.receive.order.publish_id
                phase = fleet_pb2.PUBLISH_PHASE_LOADED
                await self._say(publish_id, phase, bucket_digests=self.digests)
            case "commit":
                await self._commit(message.commit)
            case "abort":
                self.version = None
            case "rest":
                self.rests.append(message.rest.give_back)
                self.is_resting = True
                rested = fleet_pb2.Rested(number=message.rest.number)
                await self.outbox.put(fleet_pb2.ServerMessage(rested=rested))
            case "wake":
                self.is_resting = False
            case "drain" if message.drain.finish:
                self.tasks.create_task(self.leave())
            case "drain":
                self.run_stopped = message.drain.run_stopped
                await self._drain()

    async def _fetch(self, prepare: fleet_pb2.PreparePublish) -> None:
        await self.link.wait()
        await asyncio.sleep(self.fetch_s)
        self.fetched.append(prepare.stored.key)
        await self._say(prepare.publish_id, fleet_pb2.PUBLISH_PHASE_READY)

    async def _close(self, group_id: str, episodes: list[asyncio.Task]) -> None:
        await asyncio.gather(*episodes, return_exceptions=True)
        if not self.killed:
            members = sorted(
                member for group, member in self.unfinished if group == group_id
            )
            report = fleet_pb2.LeaseReport(
                group_id=group_id, closed=True, unfinished=members
            )
            await self.outbox.put(fleet_pb2.ServerMessage(lease=report))

    async def _load(self, spec) -> None:
        report = fleet_pb2.EnvironmentReport(environment=spec.name, num_tasks=10)
        if spec.name in self.failing_environments:
            report.failure.message = "no module named nowhere"
        await self.outbox.put(fleet_pb2.ServerMessage(environment=report))

    async def _commit(self, commit: fleet_pb2.CommitPublish) -> None:
        if list(commit.bucket_digests) != self.digests:
            await self._say(
                commit.publish_id, fleet_pb2.PUBLISH_PHASE_FAILED, message="digests"
            )
            return
        self.version = version_from_pb(commit.version)
        self.is_resting = False
        self.loaded_versions.append(self.version)
        phase = fleet_pb2.PUBLISH_PHASE_SERVING
        probe = commit.probe.expected_logprobs
        await self._say(commit.publish_id, phase, probe_logprobs=probe, paused_s=0.01)

    async def _say(self, publish_id: str, phase, **fields) -> None:
        report = fleet_pb2.PublishReport(publish_id=publish_id, phase=phase, **fields)
        await self.outbox.put(fleet_pb2.ServerMessage(publish=report))

    async def leave(self) -> None:
        """Drains as on SIGTERM: finishes what ends at once, hands the rest back."""
        draining = fleet_pb2.Draining(reason="it was told to stop")
        await self.outbox.put(fleet_pb2.ServerMessage(draining=draining))
        await self.departure.wait()
        running = list(self.running.values())
        if running:
            await asyncio.wait(running, timeout=0.05)
        await self._drain()
        await self.outbox.put(None)

    async def _drain(self) -> None:
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        # Trajectories of an open group are acknowledged with the group, perhaps much later.
        until_s = time.monotonic() + 0.3
        while self.sender.queued_bytes and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        self.drained = True
        await self.outbox.put(fleet_pb2.ServerMessage(drained=self.report()))

    async def _episode(self, lease: fleet_pb2.Lease, member: int) -> None:
        for attempt in range(lease.first_attempt, lease.max_attempts):
            version = self.version
            tokens = self.reply_tokens
            self.generated += tokens
            verdict: float | Failure
            try:
                self.gated += tokens
                await self.gate.wait()
                self.gated -= tokens
                if lease.purpose == trajectory_pb2.EPISODE_PURPOSE_EVALUATION:
                    await self.evaluation_gate.wait()
                if self.hangs(lease, member, attempt):
                    await asyncio.Event().wait()
                await asyncio.sleep(self.delay_s * coin(lease, member, attempt))
                verdict = self.judge(lease, member, attempt)
            except asyncio.CancelledError:
                if self.killed:
                    raise
                await self._deliver(
                    lease, member, attempt, version, Status.CANCELLED, 0.0
                )
                return
            if not isinstance(verdict, Failure):
                self.unfinished.discard((lease.group_id, member))
                await self._deliver(
                    lease, member, attempt, version, Status.COMPLETED, verdict
                )
                return
            last = attempt + 1 == lease.max_attempts
            last = last or verdict.kind is FailureKind.PROMPT_TOO_LONG
            if last:
                self.unfinished.discard((lease.group_id, member))
            await self._deliver(
                lease,
                member,
                attempt,
                version,
                Status.FAILED,
                0.0,
                verdict,
                will_retry=not last,
            )

    async def _deliver(
        self,
        lease,
        member,
        attempt,
        version,
        status,
        reward,
        failure=None,
        *,
        will_retry=False,
    ) -> None:
        tokens = self.reply_tokens
        trajectory = plain_trajectory(
            np.arange(3 + tokens),
            (3, tokens),
            run_id=self.run_id,
            group_id=GroupId(lease.group_id),
            member=member,
            attempt=attempt,
            generation_s=self.generation_s,
            server_id=ServerId(self.name),
            server_epoch=self.epoch,
            environment=lease.environment,
            task_index=lease.task_index,
            seed=lease.seed,
            purpose=Purpose(lease.purpose),
            status=status,
            failure=failure,
            will_retry=will_retry,
            version_spans=(VersionSpan(tokens, version or PolicyVersion(0, 0)),),
            reward=reward,
            prompt_logprobs=PROMPT_LOGPROBS if lease.sampling.prompt_logprobs else b"",
        )
        data = encode_trajectory(self.spoil(trajectory))
        name = trajectory.trajectory_id
        self.ended = self.ended + tokens
        self.num_ended = self.num_ended + 1
        self.delivering[name] = tokens
        await asyncio.shield(self._put(name, seal(self.delivery_key, name, data)))

    async def _put(self, trajectory_id: str, data: bytes) -> None:
        tokens = self.delivering[trajectory_id]
        await self.sender.put(
            trajectory_id, data, timeout_s=self.put_limit_s, tokens=tokens
        )
        del self.delivering[trajectory_id]
        self.delivered.append((trajectory_id, data))


def environment_failure(lease, member, attempt) -> Failure:
    return Failure(FailureKind.ENVIRONMENT, "ValueError: broken")
