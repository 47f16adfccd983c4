"""A trainer whose weights are a digest of all that it trained; it speaks the real protocol.

Its calls follow the rules of `ControllerClient`: a controller that is away is called again, one
that was started again gets a new registration first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np
from slipstream.core.backoff import Backoff
from slipstream.core.types import PolicyVersion, Trajectory
from slipstream.protocol.codec import (
    TRAINER_EPOCH,
    pack_logprobs,
    pack_tokens,
    trajectory_from_pb,
    version_from_pb,
    version_to_pb,
)
from slipstream.protocol.rich_errors import Reason, error_info
from slipstream.protocol.weights.buckets import TensorSpec, layout_to_pb
from slipstream.v1 import trainer_pb2 as pb
from slipstream.v1 import trainer_pb2_grpc, weights_pb2

from simulation.fleet import Wire, bucket_digests
from simulation.network import SimulatedChannel
from simulation.virtual_loop import Process, VirtualLoop

LAYOUT = layout_to_pb([TensorSpec("w", "float32", (4, 4))], 1 << 20)
START_WEIGHTS = b"the start"
PROBE = weights_pb2.Probe(
    token_ids=pack_tokens(np.arange(4, dtype=np.uint32)),
    lengths=[4],
    expected_logprobs=pack_logprobs(np.full(3, -2.0, np.float32)),
    tolerance=1e-3,
)


@dataclass
class Truth:
    """What trainers did, kept outside of the product: survives every kill."""

    # The newest checkpoint, which a trainer that starts loads.
    checkpoint: tuple[PolicyVersion, bytes] = (PolicyVersion(0, 0), START_WEIGHTS)
    # The weights that trainers called by a version.
    weights: dict[PolicyVersion, set[bytes]] = field(
        default_factory=lambda: {PolicyVersion(0, 0): {START_WEIGHTS}}
    )


class TrainerGone(Exception):
    """Raised when the trainer cannot go on: it starts again from its checkpoint."""


class SimulatedTrainer:
    """One life of the trainer; `run` returns the reason of the order to stop."""

    def __init__(
        self,
        channel: SimulatedChannel,
        process: Process,
        loop: VirtualLoop,
        wire: Wire,
        truth: Truth,
        *,
        seed: str,
        alive: Callable[[str], bool],
        checkpoint_every: int,
        noise: bool,
    ) -> None:
        self._stub: Any = trainer_pb2_grpc.TrainerServiceStub(channel)
        self._process, self._loop, self._wire, self._truth = process, loop, wire, truth
        self._random = random.Random(f"trainer/{seed}")
        self._alive, self._checkpoint_every = alive, checkpoint_every
        self._noise = self._random.randbytes(4) if noise else b""
        self.version, self.weights = truth.checkpoint
        # The version and weights that the controller has acknowledged.
        self._told = truth.checkpoint
        self._epoch: tuple[tuple[str, str], ...] = ()
        self._fault: Exception | None = None
        self._entering = asyncio.Lock()
        self._communicator = ""

    async def run(self) -> str:
        welcome = await self._enter()
        self._adopt(welcome.version)
        keeping = asyncio.ensure_future(self._keep_place())
        try:
            while True:
                order = await self._next()
                kind = order[0].WhichOneof("directive")
                if kind == "batch":
                    await self._train(order)
                elif kind == "publish":
                    await self._publish(order[0].publish)
                elif kind == "stop":
                    await self._finish(with_model=not order[0].stop.without_model)
                    return str(order[0].stop.reason)
        finally:
            keeping.cancel()

    def _adopt(self, version: Any) -> None:
        self.version = version_from_pb(version)
        self._told = self.version, self.weights
        self._truth.weights.setdefault(self.version, set()).add(self.weights)

    async def _enter(self) -> pb.TrainerWelcome:
        hello = pb.TrainerHello(
            world_size=1,
            layout_description="on 1 rank",
            version=version_to_pb(self._told[0]),
            weight_digest=self._told[1],
            process=self._process.name,
        )
        backoff = Backoff(0.5, 5.0)
        until_s = self._loop.now_s + 300
        while True:
            try:
                welcome = await self._stub.Register(hello, timeout=60)
                break
            except grpc.aio.AioRpcError as error:
                is_away = error.code() is grpc.StatusCode.UNAVAILABLE
                if not (is_away or _has_reason(error, Reason.PLACE_TAKEN)):
                    raise TrainerGone(f"Register: {error.details()}") from error
                if self._loop.now_s > until_s:
                    raise TrainerGone("no place in the run") from error
            await asyncio.sleep(backoff.take_s())
        self._epoch = ((TRAINER_EPOCH, str(welcome.trainer_epoch)),)
        return welcome

    async def _keep_place(self) -> None:
        while True:
            try:
                async for _ in self._stub.KeepPlace(pb.PlaceRequest(), metadata=self._epoch):
                    pass
            except grpc.aio.AioRpcError as error:
                if _has_reason(error, Reason.NOT_REGISTERED):
                    async with self._entering:
                        await self._enter_again()
                elif error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    return
            await asyncio.sleep(0.5)

    async def _enter_again(self) -> None:
        try:
            found = version_from_pb((await self._enter()).version)
        except TrainerGone as error:
            self._fault = error
            return
        if found != self._told[0]:
            self._fault = TrainerGone(f"version {self._told[0]} is called {found} now")

    async def _retried(self, call: Callable[[], Awaitable[Any]]) -> Any:
        until_s = self._loop.now_s + 300
        while True:
            epoch = self._epoch
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                async with self._entering:
                    has_entered = self._epoch is not epoch
                if self._fault is not None:
                    raise self._fault from error
                if has_entered:
                    continue
                is_away = error.code() is grpc.StatusCode.UNAVAILABLE
                is_away |= _has_reason(error, Reason.NOT_REGISTERED)
                if not is_away or self._loop.now_s > until_s:
                    raise TrainerGone(str(error.details())) from error
            await asyncio.sleep(0.5)

    async def _call(self, name: str, request: Any, timeout: float = 60.0) -> Any:
        method = getattr(self._stub, name)
        return await self._retried(
            lambda: method(request, timeout=timeout, metadata=self._epoch)._answer()
        )

    async def _next(self) -> list[pb.Directive]:
        async def call() -> list[pb.Directive]:
            request = pb.NextRequest(
                version=version_to_pb(self.version),
                communicator_id=self._communicator,
                bucket_digests=bucket_digests(self.weights),
            )
            stream = self._stub.Next(request, timeout=60.0, metadata=self._epoch)
            return [directive async for directive in stream]

        order: list[pb.Directive] = []
        while not order:
            order = await self._retried(call)
        return order

    async def _train(self, order: Sequence[pb.Directive]) -> None:
        header = order[0].batch
        batch = [trajectory_from_pb(t) for d in order[1:] for t in d.chunk.trajectories]
        assert header.step == self.version.step
        assert len(batch) == header.num_trajectories
        await asyncio.sleep(self._random.uniform(0.05, 0.5))
        faulty = sorted({t.group_id for t in batch if not is_trainable(t.group_id)})
        if faulty:
            fault = pb.DataFault(step=header.step, batch_id=header.batch_id, group_ids=faulty)
            failure = pb.TrainerFailure(message="its data are bad", data=fault)
            if not (await self._call("ReportFailure", failure)).set_aside:
                raise TrainerGone("the batch was not set aside")
            return
        self.weights = trained(self.weights, batch, self._noise)
        version = PolicyVersion(self.version.incarnation, header.step + 1)
        report = pb.StepReport(
            step=header.step,
            batch_id=header.batch_id,
            version=version_to_pb(version),
            weight_digest=self.weights,
            metrics={"trained_tokens": sum(t.num_sampled_tokens for t in batch)},
            wall_s=0.1,
        )
        receipt = await self._call("ReportStep", report)
        self._adopt(receipt.version)
        if self._checkpoint_every and self.version.step % self._checkpoint_every == 0:
            self._truth.checkpoint = (self.version, self.weights)
            checkpoint = pb.CheckpointReport(
                version=version_to_pb(self.version), weight_digest=self.weights
            )
            await self._call("ReportCheckpoint", checkpoint)

    async def _publish(self, order: weights_pb2.PublishOrder) -> None:
        assert version_from_pb(order.version) == self.version
        result = pb.PublishResult(publish_id=order.publish_id)
        if order.new_communicator:
            self._communicator = ""
        problem = ""
        if not order.begun:
            if not order.new_communicator and self._communicator != (
                order.communicator.communicator_id
            ):
                problem = "the communicator is gone: a new one is needed"
            else:
                start = pb.PublishStart(
                    publish_id=order.publish_id, layout=LAYOUT, communicator=order.communicator
                )
                limit_s = order.join_deadline_s + 60
                started = await self._call("StartPublish", start, limit_s)
                if not started.receivers:
                    return
                if len(started.receivers) < len(order.receivers):
                    problem = "a server did not take part"
        problem = problem or await self._send(order)
        if problem:
            result.error, self._communicator = problem, ""
        else:
            result.bucket_digests.extend(bucket_digests(self.weights))
            if order.verify:
                result.probe.CopyFrom(PROBE)
        receipt = await self._call("FinishPublish", result)
        if receipt.discard_communicator:
            self._communicator = ""

    async def _send(self, order: weights_pb2.PublishOrder) -> str:
        """Sends the weights; returns the first problem. One lost member fails all."""
        parcel = self._wire.parcel(order.publish_id)
        names = {r.server_id for r in order.receivers}
        until_s = self._loop.now_s + order.join_deadline_s
        while not names <= {name.partition("/")[0] for name in parcel.joined}:
            if self._loop.now_s > until_s:
                return "a server did not join in time"
            if not await self._has_all(order):
                return "a server is gone"
            await asyncio.sleep(0.2)
        self._communicator = order.communicator.communicator_id
        await asyncio.sleep(self._random.uniform(0.01, 0.2))
        until_s = self._loop.now_s + order.bucket_deadline_s
        while self._wire.cut:
            if self._loop.now_s > until_s:
                parcel.arrived.set()
                return "a bucket was not sent in time"
            await asyncio.sleep(0.2)
        if not all(self._alive(name) for name in parcel.joined):
            parcel.arrived.set()
            return "a member of the communicator is gone"
        parcel.weights = self.weights
        parcel.arrived.set()
        return ""

    async def _has_all(self, order: weights_pb2.PublishOrder) -> bool:
        question = pb.PublishStart(publish_id=order.publish_id, is_question=True)
        try:
            answer = await self._stub.StartPublish(question, timeout=10.0, metadata=self._epoch)
        except grpc.aio.AioRpcError as error:
            return not _has_reason(error, Reason.NOT_REGISTERED)
        return len(answer.receivers) >= len(order.receivers)

    async def _finish(self, *, with_model: bool) -> None:
        self._truth.checkpoint = (self.version, self.weights)
        path = "checkpoints/final" if with_model else ""
        goodbye = pb.TrainerGoodbye(weight_digest=self.weights, export_path=path)
        await self._call("Finish", goodbye)


def is_trainable(group_id: str) -> bool:
    """Whether the data of a group can be trained: the same in every life of the trainer."""
    return hashlib.blake2b(group_id.encode(), digest_size=1).digest()[0] % 16 != 1


def trained(weights: bytes, batch: Sequence[Trajectory], noise: bytes = b"") -> bytes:
    """What training makes of weights: it depends on all that is trained, and on its order."""
    state = hashlib.blake2b(weights + noise, digest_size=16)
    for trajectory in batch:
        state.update(trajectory.token_ids.tobytes() + f"{trajectory.reward}".encode())
    return state.digest()


def _has_reason(error: grpc.aio.AioRpcError, reason: Reason) -> bool:
    with contextlib.suppress(TypeError):
        info = error_info(error.trailing_metadata())
        return info is not None and info.reason == reason.value
    return False
