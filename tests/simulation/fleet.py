"""Rollout servers of the product around an engine that samples numbers in place of tokens.

Each sampled token is the number of an entry in `Tokens`, which says what really sampled it.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from slipstream.core.configuration.reply_ends import NO_ENDS
from slipstream.core.errors import WeightSyncError
from slipstream.core.types import PolicyVersion, VersionSpan
from slipstream.protocol.codec import merge_spans
from slipstream.rollout_server.engine_interface import (
    EngineUse,
    FinishReason,
    Generation,
    LoadedWeights,
)
from slipstream.rollout_server.episodes.calls import CallTable
from slipstream.rollout_server.episodes.worker_gateway import NO_LIMITS
from slipstream.rollout_server.episodes.workers import EnvironmentWorker
from slipstream.v1 import environment_pb2, trajectory_pb2, weights_pb2

from simulation import storage
from simulation.virtual_loop import Process, VirtualLoop

if TYPE_CHECKING:
    from simulation.trainer import Truth

NUM_TASKS = 3
FIRST_TOKEN = 100
TORN = b"torn"
# Weights that an engine holds that received the right bytes and computes with others.
MISLOADED = b"misloaded"
PROBE_LOGPROB = -2.0


@dataclass(frozen=True)
class Sampled:
    """What really sampled a token: a server process, and the weights in its engine."""

    server: str
    version: PolicyVersion
    weights: bytes


@dataclass
class Tokens:
    """Every token of a simulated run, by its id."""

    sampled: list[Sampled] = field(default_factory=list)

    def add(self, sampled: Sampled) -> int:
        self.sampled.append(sampled)
        return FIRST_TOKEN + len(self.sampled) - 1

    def find(self, token: int) -> Sampled:
        return self.sampled[token - FIRST_TOKEN]


class SecondEnvironment(Enum):
    """What a second environment does in place of all that the first one does."""

    ALIKE = "alike"
    # Its answers take 50 times as long.
    SLOW = "slow"
    # All its episodes fail.
    FAILING = "failing"
    # The rewards of each of its groups are equal.
    FILTERED = "filtered"


def verdict_on(reply: str) -> tuple[float, bool]:
    """The reward of a reply, and whether it ends its episode: the same wherever it is judged."""
    first, second = hashlib.blake2b(reply.encode(), digest_size=2).digest()
    # Two members have the same reward often enough for filters.
    return first % 3 / 2, second % 2 == 0


def text_of(tokens: Iterable[int]) -> str:
    return " ".join(map(str, tokens))


def bucket_digests(weights: bytes) -> tuple[bytes, ...]:
    return tuple(
        hashlib.blake2b(weights + bytes([b]), digest_size=16).digest() for b in (0, 1)
    )


@dataclass
class Parcel:
    """The weights of one publish on their way to its receivers."""

    joined: set[str] = field(default_factory=set)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    weights: bytes = b""
    # Receivers that get other bytes than were sent.
    torn_for: set[str] = field(default_factory=set)


class Wire:
    """The way of weights from the trainer to the engines."""

    def __init__(self) -> None:
        self.parcels: dict[str, Parcel] = {}
        # How many loads of a server process will go wrong in a way: (the way, its name).
        self.planned: Counter[tuple[str, str]] = Counter()
        self.fired: set[str] = set()
        self.cut = False

    def parcel(self, publish_id: str) -> Parcel:
        return self.parcels.setdefault(publish_id, Parcel())

    def take(self, kind: str, server: str) -> bool:
        """Whether a fault that was planned for a server happens now."""
        if not self.planned[kind, server]:
            return False
        self.planned[kind, server] -= 1
        self.fired.add(kind)
        return True


class SimulatedEngine:
    """Samples one token after another; its weights are what the wire brought."""

    num_workers = 1
    max_model_len = 4096
    num_experts = 0
    disabled_features: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, process: Process, loop: VirtualLoop, wire: Wire, tokens: Tokens, seed: str
    ) -> None:
        self.process = process
        self._loop = loop
        self._wire = wire
        self._tokens = tokens
        self._random = random.Random(f"engine/{seed}")
        # Servers differ, so that groups come back out of order.
        self.token_s = self._random.choice((0.02, 0.1, 0.3))
        self.requests = self.pauses = self
        self.version: PolicyVersion | None = None
        # Nothing that may be sampled from, before the first publish.
        self.weights = TORN
        self.violations: list[str] = []
        self.truth: Truth
        self._is_running = asyncio.Event()
        self._generated = self._returned = 0
        self._cancelled: dict[str, asyncio.Event] = {}

    def use(self) -> EngineUse:
        return EngineUse(self._generated, self._returned, len(self._cancelled), 0.0)

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: Any,
        max_tokens: int,
        **_: Any,
    ) -> Generation:
        cancelled = self._cancelled[request_id] = asyncio.Event()
        token_ids: list[int] = []
        spans: list[VersionSpan] = []
        length = self._random.randint(1, max_tokens)
        try:
            while len(token_ids) < length and not cancelled.is_set():
                await self._either(self._is_running, cancelled)
                await asyncio.sleep(self.token_s * self._random.uniform(0.5, 1.5))
                if not self._is_running.is_set() or cancelled.is_set():
                    continue
                assert self.version is not None
                sampled = Sampled(self.process.name, self.version, self.weights)
                token_ids.append(self._tokens.add(sampled))
                spans.append(VersionSpan(1, self.version))
                self._generated += 1
        finally:
            del self._cancelled[request_id]
        self._returned += len(token_ids)
        reason = FinishReason.CANCELLED if cancelled.is_set() else FinishReason.STOP
        return Generation(
            np.asarray(token_ids, dtype=np.uint32),
            np.full(len(token_ids), -0.5, dtype=np.float32),
            merge_spans(spans),
            reason,
        )

    @staticmethod
    async def _either(first: asyncio.Event, second: asyncio.Event) -> None:
        if first.is_set() or second.is_set():
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (first, second)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def cancel(self, request_id: str) -> None:
        if request_id in self._cancelled:
            self._cancelled[request_id].set()

    async def pause(self) -> None:
        self._is_running.clear()

    async def rest(self, *, give_back: bool) -> None:
        self._is_running.clear()

    async def prepare_weights(
        self,
        order: weights_pb2.PublishOrder,
        layout: weights_pb2.WeightLayout,
        first_rank: int,
    ) -> None:
        self._order = order
        self._deadline_s = order.join_deadline_s + 2 * order.bucket_deadline_s
        self._is_probed = order.verify
        await asyncio.sleep(self._random.uniform(0.0, 0.05))
        if order.communicator.transport != "storage":
            self._wire.parcel(order.publish_id).joined.add(self.process.name)

    async def receive_weights(self, publish_id: str) -> LoadedWeights:
        await self.pause()
        self.weights = TORN
        is_stored = self._order.communicator.transport == "storage"
        arrived = b"" if is_stored else await self._received(publish_id)
        await asyncio.sleep(self._random.uniform(0.0, 0.1))
        if self._wire.take("failed load", self.process.name):
            raise WeightSyncError("the engine could not load the weights")
        if is_stored:
            content = storage.loaded(self._order)
            arrived = storage.weights_of(content)
            digests = storage.digests_of(content)
            if not self.truth.holds(arrived):
                self.violations.append(
                    f"{self.process.name} fetched what no trainer wrote"
                )
        self.weights = arrived
        if self._wire.take("torn bucket", self.process.name):
            self.weights = TORN
        if not is_stored or self.weights == TORN:
            digests = bucket_digests(self.weights)
        # Only a probe shows this.
        if self._is_probed and self._wire.take("misloaded weights", self.process.name):
            self.weights = MISLOADED
        return LoadedWeights(digests)

    async def _received(self, publish_id: str) -> bytes:
        parcel = self._wire.parcel(publish_id)
        try:
            async with asyncio.timeout(self._deadline_s):
                await parcel.arrived.wait()
        except TimeoutError:
            raise WeightSyncError("a bucket did not come in time") from None
        if not parcel.weights:
            raise WeightSyncError("a member of the communicator is gone")
        return parcel.weights

    async def resume(self, version: PolicyVersion) -> None:
        if self.weights == TORN:
            self.violations.append(
                f"{self.process.name} serves {version} with torn weights"
            )
        self.version = version
        self._is_running.set()

    async def teacher_forced_logprobs(
        self, sequences: Sequence[Sequence[int]], adapters: Sequence[str] = ()
    ) -> Any:
        await asyncio.sleep(self._random.uniform(0.01, 0.5))
        size = sum(len(sequence) - 1 for sequence in sequences)
        logprob = PROBE_LOGPROB - (self.weights == MISLOADED)
        return np.full(size, logprob, dtype=np.float32)

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        pass


class NumberRenderer:
    """Renders every prompt as three tokens."""

    writes_tools = False
    ends = NO_ENDS

    def prompt(self, messages: Any, inputs: Any = None) -> list[int]:
        return [1, 2, 3]

    def continuation(
        self, history: Any, messages: Any, last: Any, **options: Any
    ) -> list[int]:
        return [4, 5]

    def with_images(
        self, tokens: list[int], messages: Any
    ) -> tuple[list[int], list[Any]]:
        return tokens, []

    def told_apart(self, before: Any, reply: Any, text: str, parsed: Any) -> Any:
        return parsed

    def cannot_fit(self, messages: Any, num_tokens: int) -> bool:
        return False

    decode = decode_all = decode_prompt = staticmethod(text_of)


class SimulatedGateway:
    """Takes the place of the service to which worker processes attach."""

    limits = NO_LIMITS
    takes_tools = False

    def __init__(
        self,
        loop: VirtualLoop,
        seed: str,
        log_dir: Path,
        second: SecondEnvironment | None,
    ) -> None:
        self.loop, self.random, self.log_dir = (
            loop,
            random.Random(f"worker/{seed}"),
            log_dir,
        )
        self.second = second
        self.logs = SimpleNamespace(watch=asyncio.Event().wait)
        self.variables: dict[str, str] = {}
        # Calls that fail, or workers that end, for a share of the calls.
        self.failing = 0.0

    async def __aenter__(self) -> SimulatedGateway:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def expect(self, stream: Any) -> None:
        pass

    forget = expect


class SimulatedWorker(EnvironmentWorker):
    """A worker whose process is a few answers with a delay."""

    async def _start(self, index: int) -> Any:
        self.table = CallTable(self._answer_later)
        self._stream.attached.set()
        return WorkerLife()

    def _answer_later(self, command: environment_pb2.WorkerCommand) -> None:
        gateway: Any = self._gateway
        copy = environment_pb2.WorkerCommand.FromString(command.SerializeToString())
        delay_s = gateway.random.uniform(0.001, 0.02)
        if self._is(SecondEnvironment.SLOW):
            delay_s *= 50
        gateway.loop.call_later(delay_s, self._answer, copy)

    def _is(self, second: SecondEnvironment) -> bool:
        """Whether this is a worker of the second environment, and that is such a one."""
        gateway: Any = self._gateway
        return self._spec.name == "f" and gateway.second is second

    def _answer(self, command: environment_pb2.WorkerCommand) -> None:
        gateway: Any = self._gateway
        answer = environment_pb2.WorkerMessage(call_id=command.call_id)
        kind = command.WhichOneof("command")
        if kind == "load":
            answer.loaded.num_tasks = NUM_TASKS
        elif kind in ("reset", "step") and (
            gateway.random.random() < gateway.failing
            or self._is(SecondEnvironment.FAILING)
        ):
            answer.failure.kind = trajectory_pb2.FAILURE_KIND_ENVIRONMENT
            answer.failure.message = "ValueError: broken"
        elif kind == "reset":
            answer.observation.messages.add(role="user", content="a")
        elif kind == "step" and self._is(SecondEnvironment.FILTERED):
            answer.verdict.done = True
        elif kind == "step":
            answer.verdict.reward, answer.verdict.done = verdict_on(command.step.reply)
            if not answer.verdict.done:
                answer.verdict.messages.add(role="user", content="b")
        else:
            answer.pong.SetInParent()
        self.table.answered(answer)


class WorkerLife:
    """The process of a worker, which never ends by itself."""

    was_killed = False

    async def wait(self) -> str:
        await asyncio.Event().wait()
        return ""

    def end(self) -> None:
        pass

    async def close(self) -> None:
        pass
