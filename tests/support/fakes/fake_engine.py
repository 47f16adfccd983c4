"""An inference engine without a model: its tokens say which version sampled them."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from slipstream.core.errors import WeightSyncError
from slipstream.core.types import LogprobArray, PolicyVersion, VersionSpan
from slipstream.protocol.codec import merge_spans
from slipstream.rollout_server import engine_interface
from slipstream.rollout_server.usage import UseClock
from slipstream.v1 import fleet_pb2, weights_pb2

from support.rigs.waiting import LIMIT_S

EOS = 2
# Bucket digests that the engine reports for the weights it received.
DIGESTS = (b"digest",)


@dataclass
class _Request:
    tokens: list[int] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    cancelled: bool = False


class FakeEngine:
    """Samples token 4 + (version mod 20), one in each round of the event loop, then the end.

    `limit` holds every request before that number of its tokens, `stop_after` tokens end a reply.
    """

    num_workers = 1
    max_model_len = 64
    num_experts = 4
    disabled_features: Mapping[str, str] = MappingProxyType({})
    # Objects that vLLM's application for agents would need.
    llm = None

    def __init__(self) -> None:
        self.version: PolicyVersion | None = None
        self.running = asyncio.Event()
        self.limit: int | None = None
        self.stop_after = 3
        # The sampling settings of each request, in order of arrival.
        self.samplings: list[engine_interface.Sampling] = []
        # The cause of GenerationFailed, or another error that each request raises.
        self.fail_with: str | Exception | None = None
        self.weights_error: str | None = None
        self.prepare_error: str | None = None
        self.digests: tuple[bytes, ...] = DIGESTS
        # When it came to the copies of new weights.
        self.began_s = 0.0
        # While it is not set, `prepare` waits for the other members.
        self.others_came = asyncio.Event()
        self.others_came.set()
        self.prepared = ""
        self.orders: list[
            tuple[weights_pb2.PublishOrder, weights_pb2.WeightLayout]
        ] = []
        self.ran_while_prepared = False
        self.probe: LogprobArray = np.zeros(0, dtype=np.float32)
        self.num_pauses = 0
        # Whether each rest gave memory back.
        self.rests: list[bool] = []
        self.died = asyncio.Event()
        self.closed = False
        # The last token of replies that stop.
        self.end_token = EOS
        # Two layers: position p goes to expert p mod 4 in the first, p + 1 mod 4 in the second.
        self.records_experts = False
        self._changed = asyncio.Event()
        self._requests: dict[str, _Request] = {}
        self._generated = 0
        self._returned = 0
        self._clock = UseClock()
        self._clock.pause()

    @property
    def requests(self) -> "FakeEngine":
        return self

    @property
    def pauses(self) -> "FakeEngine":
        return self

    def use(self) -> engine_interface.EngineUse:
        return engine_interface.EngineUse(
            generated_tokens=self._generated,
            returned_tokens=self._returned,
            open_requests=len(self._requests),
            busy_s=self._clock.busy_s,
            paused_s=self._clock.paused_s,
        )

    def let_go(self, limit: int | None = None) -> None:
        self.limit = limit
        self._wake()

    async def wait_tokens(self, number: int) -> None:
        """Waits until the engine has sampled `number` tokens in all."""
        async with asyncio.timeout(LIMIT_S):
            while self._generated < number:
                await asyncio.sleep(0)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: engine_interface.Sampling,
        max_tokens: int,
        *,
        experts_from: int = 0,
        images: Sequence[object] = (),
    ) -> engine_interface.Generation:
        assert request_id not in self._requests
        self.samplings.append(sampling)
        request = self._requests[request_id] = _Request()
        self._clock.enter()
        try:
            reason = await self._sample(request, max_tokens)
        finally:
            del self._requests[request_id]
            self._clock.leave()
        self._returned += len(request.tokens)
        return engine_interface.Generation(
            token_ids=np.asarray(request.tokens, dtype=np.uint32),
            logprobs=np.full(len(request.tokens), -0.5, dtype=np.float32),
            version_spans=merge_spans(request.spans),
            finish_reason=reason,
            expert_ids=self._experts(
                experts_from, len(prompt_token_ids) + len(request.tokens)
            ),
            prompt_logprobs=np.arange(1 - len(prompt_token_ids), 0, dtype=np.float32)
            if sampling.prompt_logprobs
            else None,
        )

    async def stream(
        self, *asked: Any, options: engine_interface.TextOptions, **others: Any
    ) -> AsyncGenerator[engine_interface.TextPart, None]:
        generation = await self.generate(*asked, **others)
        tokens = generation.token_ids.tolist()
        yield engine_interface.TextPart(
            tokens, " ".join(map(str, tokens)), generation=generation
        )

    async def cancel(self, request_id: str) -> None:
        if request_id in self._requests:
            self._requests[request_id].cancelled = True
            self._wake()

    async def pause(self) -> None:
        self.num_pauses += 1
        self._clock.pause()
        self.running.clear()
        self._wake()

    async def rest(self, *, give_back: bool) -> None:
        self.rests.append(give_back)
        self._clock.pause()
        self.running.clear()
        self._wake()

    async def prepare_weights(
        self,
        order: weights_pb2.PublishOrder,
        layout: weights_pb2.WeightLayout,
        first_rank: int,
    ) -> None:
        self.prepared = order.publish_id
        self.orders.append((order, layout))
        self.ran_while_prepared = self.running.is_set()
        await self.others_came.wait()
        await asyncio.sleep(0)
        if self.prepare_error is not None:
            raise WeightSyncError(self.prepare_error)

    async def receive_weights(self, publish_id: str) -> engine_interface.LoadedWeights:
        assert self.prepared == publish_id
        await self.pause()
        await asyncio.sleep(0)
        if self.weights_error is not None:
            raise WeightSyncError(self.weights_error)
        stages = fleet_pb2.PublishStages(
            pause_s=0.0625, receive_s=0.25, load_s=0.5, wire_s=0.125, copied=True
        )
        return engine_interface.LoadedWeights(self.digests, stages, self.began_s)

    async def resume(self, version: PolicyVersion) -> None:
        self.version = version
        self._clock.resume()
        self.running.set()
        self._wake()

    async def teacher_forced_logprobs(
        self, sequences: Sequence[Sequence[int]], adapters: Sequence[str] = ()
    ) -> LogprobArray:
        return self.probe

    async def watch(self) -> None:
        await self.died.wait()
        raise engine_interface.EngineDied("the fake engine was told to die")

    async def aclose(self) -> None:
        self.closed = True

    async def _sample(
        self, request: _Request, max_tokens: int
    ) -> engine_interface.FinishReason:
        while not request.cancelled:
            if self.fail_with is not None:
                failed = self.fail_with
                if isinstance(failed, Exception):
                    raise failed
                raise engine_interface.GenerationFailed(failed)
            is_full = self.limit is not None and len(request.tokens) >= self.limit
            if is_full or not self.running.is_set():
                await self._changed.wait()
                continue
            assert self.version is not None
            last = len(request.tokens) + 1 > self.stop_after
            request.tokens.append(
                self.end_token if last else 4 + self.version.step % 20
            )
            request.spans.append(VersionSpan(1, self.version))
            self._generated += 1
            if last:
                return engine_interface.FinishReason.STOP
            if len(request.tokens) == max_tokens:
                return engine_interface.FinishReason.LENGTH
            await asyncio.sleep(0)
        return engine_interface.FinishReason.CANCELLED

    def _experts(self, start: int, end: int) -> npt.NDArray[np.uint8] | None:
        if not self.records_experts:
            return None
        places = np.arange(start, end - 1, dtype=np.uint8)
        return np.stack([places % 4, (places + 1) % 4], axis=-1)[:, :, None]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
