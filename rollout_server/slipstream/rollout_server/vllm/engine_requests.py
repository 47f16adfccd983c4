"""The open requests of a vLLM engine: admitted, added, cancelled and counted.

Prompts are exact tokens; the pixels of their images are computed here. Consumes: requests.
Produces: vLLM's outputs. Waits for: the end of a pause, the next output. Unblocked by: these, or a
cancelled request.
"""

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from slipstream.core.models.images import PlacedImage, load_processor
from slipstream.rollout_server.engine_interface import (
    EngineUse,
    Generation,
    RequestRefused,
    Requests,
    Sampling,
    TextOptions,
    TextPart,
)
from slipstream.rollout_server.vllm.adapter_slot import AdapterRequests
from slipstream.rollout_server.vllm.engine_pause import EnginePause
from slipstream.rollout_server.vllm.vllm_requests import ReplyRecord, ReplyText, as_ours, parameters
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.inputs.engine import MultiModalInput, TokensInput, mm_input, tokens_input
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.loggers import PrometheusStatLogger

# Prefix of the ids of requests that score a probe and belong to no episode.
PROBE_PREFIX = "probe/"

# Images whose pixels are kept: the members of a group have the same images.
_KEPT_IMAGES = 32


class EngineRequests(Requests):
    """Requests of one engine, by id; during a pause they wait to be admitted."""

    def __init__(
        self,
        llm: AsyncLLM,
        pauses: EnginePause,
        adapters: AdapterRequests,
        *,
        recorded_vocabulary: int | None,
    ) -> None:
        self._llm = llm
        self._recorded_vocabulary = recorded_vocabulary
        self._pauses = pauses
        self._adapters = adapters
        loggers = llm.logger_manager.stat_loggers
        (self.counter,) = (logger for logger in loggers if isinstance(logger, TokenCounter))
        self._vocabulary = llm.model_config.get_vocab_size()
        self._item = lru_cache(_KEPT_IMAGES)(self._new_item)
        self._returned_tokens = 0
        # Open requests; True marks one to be cancelled, also before the engine knows it.
        self._open: dict[str, bool] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def use(self) -> EngineUse:
        return EngineUse(
            generated_tokens=self.counter.generated_tokens,
            returned_tokens=self._returned_tokens,
            open_requests=len(self._open),
            busy_s=self._pauses.clock.busy_s,
            paused_s=self._pauses.clock.paused_s,
            drafted_tokens=self.counter.drafted_tokens,
            accepted_tokens=self.counter.accepted_tokens,
        )

    def collect(self) -> Iterator[Metric]:
        """Yields gauges and counters of the load, as a collector for Prometheus.

        vLLM's own metrics would cost an observation for each token. These are vLLM's newest
        statistics, which the scheduler sends once a second while it works.
        """
        counter = self.counter
        num_open = self.num_open
        # An engine without requests takes no step and sends nothing.
        works = num_open > 0
        for name, meaning, value in (
            ("open_requests", "Requests to the engine, held ones included.", num_open),
            ("running_requests", "Requests in the engine's steps.", counter.running * works),
            ("waiting_requests", "Requests that wait for a place.", counter.waiting * works),
            ("kv_cache_usage_ratio", "Used share of the KV cache.", counter.cache_usage * works),
        ):
            yield GaugeMetricFamily(f"slipstream_engine_{name}", meaning, value)
        looked_up = counter.looked_up_tokens
        for name, meaning, total in (
            ("generated_tokens", "Tokens that the engine handed out.", counter.generated_tokens),
            ("prompt_tokens", "Tokens of prompts.", counter.prompt_tokens),
            ("prefix_looked_up_tokens", "Tokens looked up in the prefix cache.", looked_up),
            ("prefix_found_tokens", "Tokens found there.", counter.found_tokens),
            ("preemptions", "Requests whose memory was taken away.", counter.preemptions),
        ):
            yield CounterMetricFamily(f"slipstream_engine_{name}", meaning, total)

    async def stream(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        options: TextOptions | None,
        experts_from: int = 0,
        images: Sequence[PlacedImage] = (),
    ) -> AsyncGenerator[TextPart, None]:
        with as_ours():
            sampling_params = parameters(
                sampling, max_tokens, experts_from=experts_from, options=options
            )
        vocabulary = self._recorded_vocabulary
        has_record = vocabulary is not None and sampling.fits_a_record(vocabulary)
        record = ReplyRecord(records_kept_tokens=has_record)
        with_tops = options is not None and options.num_logprobs is not None
        text = None
        if options is not None and not sampling_params.detokenize:
            text = ReplyText(self._llm.renderer.get_tokenizer(), prompt_token_ids, options)

        def read(output: RequestOutput) -> TextPart:
            new = record.take(output)
            tops = new.logprobs if with_tops else None
            new_text = new.text if text is None else text.read(new.token_ids, new.finish_reason)
            return TextPart(new.token_ids, new_text, tops, new.stop_reason)

        self._open[request_id] = False
        self._pauses.clock.enter()
        try:
            await self._pauses.let_in(request_id)
            # The request may have been cancelled meanwhile.
            if is_wanted := not self._open[request_id]:
                adapter = self._adapters.request(sampling.adapter, by_start=sampling.by_start)
                collector = await self._add(
                    request_id, prompt_token_ids, sampling_params, adapter, images
                )
                while not (output := await self._next(request_id, collector)).finished:
                    yield read(output)
        finally:
            del self._open[request_id]
            self._pauses.clock.leave()
        if not is_wanted:
            yield TextPart((), "", generation=Generation.unbegun())
            return
        last = read(output)
        num_tokens = len(record.token_ids)
        if not request_id.startswith(PROBE_PREFIX):
            self._returned_tokens += num_tokens
        if sampling_params.stop:
            # The counter has tokens that vLLM dropped after a stop text.
            self.counter.generated_tokens -= output.metrics.num_generation_tokens - num_tokens
        yield dataclasses.replace(last, generation=record.generation(output))

    async def cancel(self, request_id: str) -> None:
        if request_id in self._open:
            self._open[request_id] = True
            self._pauses.release(request_id)
            await self._llm.abort(request_id)

    async def _add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        adapter: LoRARequest | None,
        images: Sequence[PlacedImage],
    ) -> RequestOutputCollector:
        """Passes a request to vLLM; returns the collector of its outputs.

        Raises RequestRefused for an image that cannot be read, and for a token that the model
        lacks: vLLM lets those of a larger tokenizer pass, and its engine ends by them.
        """
        with as_ours():
            tokens = list(prompt_token_ids)
            if (highest := max(tokens, default=0)) >= self._vocabulary:
                raise RequestRefused(f"token {highest}: the model has {self._vocabulary} tokens")
            items = [await asyncio.to_thread(self._item, image.data) for image in images]
            version = self._pauses.version
            salt = self._pauses.salt
            prompt: TokensInput | MultiModalInput = tokens_input(tokens, cache_salt=salt)
            if images:
                places = [
                    PlaceholderRange(offset=image.offset, length=len(mask), is_embed=mask)
                    for image, (_, mask) in zip(images, items, strict=True)
                ]
                prompt = mm_input(
                    tokens,
                    MultiModalKwargsItems({"image": [item for item, _ in items]}),
                    # vLLM caches image features by the image's name. New weights give others.
                    {"image": [f"{_name(image.data)}:{version}" for image in images]},
                    {"image": places},
                    cache_salt=salt,
                )
            collector = await self._llm.add_request(
                request_id, prompt, sampling_params, lora_request=adapter
            )
            if self._open[request_id]:
                await self._llm.abort(request_id)
            return collector

    async def _next(self, request_id: str, collector: RequestOutputCollector) -> RequestOutput:
        """Returns the next output of a request; aborts the request if the wait is cancelled."""
        with as_ours():
            try:
                return await collector.get()
            except asyncio.CancelledError:
                await self._llm.abort(request_id)
                raise

    def _new_item(self, data: bytes) -> tuple[MultiModalKwargsItem, torch.Tensor]:
        """Returns an image's pixels for vLLM, and a mask of its tokens that take features."""
        processor = load_processor(self._llm.model_config.model)
        pixels = processor.pixels(data)
        rows, columns = (side // processor.merge for side in pixels.grid[1:])
        values = torch.from_numpy(pixels.values)
        grid = torch.tensor(pixels.grid)
        flat_field = MultiModalFlatField(slices=[slice(0, len(values))])
        item = MultiModalKwargsItem(
            {
                "pixel_values": MultiModalFieldElem(values, flat_field),
                "image_grid_thw": MultiModalFieldElem(
                    grid, MultiModalBatchedField(keep_on_cpu=True)
                ),
            }
        )
        return item, torch.ones(rows * columns, dtype=torch.bool)


@lru_cache(_KEPT_IMAGES)
def _name(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class TokenCounter(PrometheusStatLogger):  # type: ignore[misc]
    """Counts the tokens that vLLM outputs, in place of its Prometheus metrics."""

    generated_tokens = 0
    # Tokens that were drafted, and drafted tokens that were accepted.
    drafted_tokens = accepted_tokens = 0
    # Numbers of prompt tokens, of tokens looked up and found in the prefix cache, and of requests
    # whose memory was taken away.
    prompt_tokens = looked_up_tokens = found_tokens = preemptions = 0
    # Running and waiting requests and the used share of the cache, as of the newest statistics.
    running = waiting = 0
    cache_usage = 0.0
    # time.monotonic of the engine's last report of a step.
    heard_s = 0.0

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        pass

    def record(
        self,
        scheduler_stats: Any,  # noqa: ANN401 - not a stable type of vLLM's
        iteration_stats: Any,  # noqa: ANN401 - not a stable type of vLLM's
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Overrides vLLM's method; counts the tokens of one message, except tokens of probes."""
        self.heard_s = time.monotonic()
        if (stats := scheduler_stats) is not None:
            self.running = stats.num_running_reqs
            self.cache_usage = stats.kv_cache_usage
            self.waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
            self.looked_up_tokens += stats.prefix_cache_stats.queries
            self.found_tokens += stats.prefix_cache_stats.hits
            if stats.spec_decoding_stats is not None:
                self.drafted_tokens += stats.spec_decoding_stats.num_draft_tokens
                self.accepted_tokens += stats.spec_decoding_stats.num_accepted_tokens
        if iteration_stats is None:
            return
        self.prompt_tokens += iteration_stats.num_prompt_tokens
        self.preemptions += iteration_stats.num_preempted_reqs
        self.generated_tokens += iteration_stats.num_generation_tokens
        for request in iteration_stats.finished_requests:
            if request.request_id.startswith(PROBE_PREFIX):
                self.generated_tokens -= request.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Overrides vLLM's method; logs nothing."""
