"""The open requests of a vLLM engine: admitted, added, cancelled and counted.

Consumes: requests. Produces: vLLM's outputs. Waits for: the end of a pause, the next output.
Unblocked by: these, or a cancelled request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from slipstream.core.models.vision.placed import PlacedImage
from slipstream.rollout_server.engine_interface import EngineUse, Generation
from slipstream.rollout_server.inference.usage import UseClock
from slipstream.rollout_server.vllm.engine_pause import EnginePause
from slipstream.rollout_server.vllm.prompts import Prompts
from slipstream.rollout_server.vllm.token_counter import TokenCounter
from slipstream.rollout_server.vllm.vllm_requests import ReplyRecord, as_ours
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector


class EngineRequests:
    """Requests of one engine, by id.

    async with requests.admitted("a") as is_wanted:     # held back during a pause
        collector = await requests.add("a", tokens, asked, adapter)
        output = await requests.next("a", collector)    # until one is finished
    generation = requests.returned(record, output, asked)
    """

    def __init__(self, llm: AsyncLLM, pauses: EnginePause) -> None:
        self._llm, self._pauses = llm, pauses
        self.counter = TokenCounter.among(llm.logger_manager.stat_loggers)
        self._clock = UseClock()
        self._prompts = Prompts(llm.model_config.model)
        self._returned_tokens = self._judged_tokens = 0
        # Open requests; True marks one to be cancelled, also before the engine knows it.
        self._open: dict[str, bool] = {}

    @property
    def num_open(self) -> int:
        """Number of admitted requests, and of those that wait to be admitted."""
        return len(self._open)

    def use(self) -> EngineUse:
        """The engine's work so far; see `Engine`."""
        return EngineUse(
            generated_tokens=self.counter.generated_tokens,
            returned_tokens=self._returned_tokens,
            open_requests=len(self._open),
            busy_s=self._clock.busy_s,
            busy_intervals=self._clock.take_intervals(),
            judged_tokens=self._judged_tokens,
            drafted_tokens=self.counter.drafted_tokens,
            accepted_tokens=self.counter.accepted_tokens,
        )

    @contextlib.asynccontextmanager
    async def admitted(self, request_id: str) -> AsyncIterator[bool]:
        """Holds a request open; False: it was cancelled before the engine knew it."""
        self._open[request_id] = False
        self._clock.enter()
        try:
            await self._pauses.let_in(request_id)
            yield not self._open[request_id]
        finally:
            del self._open[request_id]
            self._clock.leave()

    async def cancel(self, request_id: str) -> None:
        """Ends an open request soon; an unknown id is ignored."""
        if request_id in self._open:
            self._open[request_id] = True
            self._pauses.release(request_id)
            await self._llm.abort(request_id)

    async def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        asked: SamplingParams,
        adapter: LoRARequest | None,
        images: Sequence[PlacedImage] = (),
    ) -> RequestOutputCollector:
        """Hands a request to vLLM; returns the collector of its outputs."""
        with as_ours():
            collector = await self._llm.add_request(
                request_id,
                await self._prompts.prompt(prompt_token_ids, images, self._pauses),
                asked,
                lora_request=adapter,
            )
            if self._open.get(request_id):
                await self._llm.abort(request_id)
            return collector

    async def next(self, request_id: str, collector: RequestOutputCollector) -> RequestOutput:
        """Waits for the next output of a request, and aborts it if the wait is cancelled."""
        with as_ours():
            try:
                return await collector.get()
            except asyncio.CancelledError:
                await self._llm.abort(request_id)
                raise

    def returned(
        self,
        record: ReplyRecord,
        last: RequestOutput,
        asked: SamplingParams,
        *,
        is_judged: bool = False,
    ) -> Generation:
        """Counts the tokens of a finished reply, and returns it; `is_judged`: a judge's reply."""
        num_tokens = len(record.token_ids)
        self._returned_tokens += num_tokens
        if asked.stop:
            # Tokens that vLLM dropped behind a stop text were counted.
            self.counter.generated_tokens -= last.metrics.num_generation_tokens - num_tokens
        generation = record.generation(last)
        self._judged_tokens += num_tokens if is_judged else 0
        return generation
