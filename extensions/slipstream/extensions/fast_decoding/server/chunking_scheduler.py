"""vLLM's scheduler, changed to output the tokens of a reply in chunks instead of one by one.

vLLM makes, encodes, sends and decodes an object for each request and step. With the sampled token's
log-probability this object has three more small arrays, which costs a fifth to a third of the
throughput of a small model. No caller here needs every token at once. The tokens and
log-probabilities of a request are therefore kept together in the engine's process, and leave it as
one object for every `CHUNK_TOKENS`. The sampler's values are unchanged.

A chunk never holds tokens of two versions: a pause outputs all held tokens before vLLM reports the
pause as complete. The held tokens of a cancelled request are dropped.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from slipstream.core.errors import ConfigError
from slipstream.extensions.fast_decoding.server.prompt_gathering import PromptGathering
from slipstream.extensions.fast_decoding.server.steady_decoding import (
    CHUNK_TOKENS,
    STEADY,
    Chunk,
    SteadyPlanner,
    stops_of,
    takes_a_prompt,
    unsteady_cause,
)
from slipstream.rollout_server.vllm.engine_scheduler import AsyncEngineScheduler, EngineScheduler
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

# Least seconds between two statistics of the engine's load.
STATS_S = 1.0
# The fields of an output, by how the outputs of several steps become one. A vLLM with other fields
# is refused.
_FIELDS = {
    # Added up.
    "new_token_ids",
    "new_logprobs",
    "routed_experts",
    "new_sampling_mask",
    "events",
    # Taken from the first step.
    "prefill_stats",
    "new_prompt_logprobs_tensors",
    # Taken from the last step.
    "request_id",
    "finish_reason",
    "stop_reason",
    "trace_headers",
    "num_nans_in_logits",
    "kv_transfer_params",
    "ec_transfer_params",
    # Never set: fields of pooling, images, counts of drafts and scoring.
    "pooling_output",
    "mm_cache_miss_hashes",
    "spec_decode_metrics",
    "prompt_token_id_logprobs",
}


class ChunkingScheduler(EngineScheduler):
    """The engine's synchronous scheduler, which outputs the tokens of a reply in chunks.

    Requests for top log-probabilities or cumulative outputs get each token at once. For others
    `add_request` opens a chunk, and `update_from_output` fills it and outputs it when it is full or
    the request ends. A pause outputs all chunks; `finish_requests` drops a request's chunk.

    vLLM verifies drafts in one step: it samples the token after each drafted token, and keeps the
    sampled tokens up to the first that differs. All tokens of a step are sampled by that step's
    weights, so a draft made before an update is verified by the new weights.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        **kwargs: Any,  # noqa: ANN401 - vLLM's own
    ) -> None:
        # A small model has room for millions of blocks, and vLLM creates an object for each. Twice
        # what all requests of full length occupy is for them and for cached prefixes; one more
        # block is vLLM's null block.
        longest = int(vllm_config.model_config.max_model_len)
        groups = kv_cache_config.kv_cache_groups
        of_one = sum(-(-longest // int(group.kv_cache_spec.block_size)) for group in groups)
        usable = 2 * of_one * int(vllm_config.scheduler_config.max_num_seqs) + 1
        if usable < kv_cache_config.num_blocks:
            kv_cache_config = dataclasses.replace(kv_cache_config, num_blocks=usable)
        super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **kwargs)
        self._chunks: dict[str, Chunk] = {}
        # Requests without a chunk, whose log-probabilities vLLM itself must extract.
        self._streamed: set[str] = set()
        self._num_added = 0
        self._next_stats_s = 0.0
        self._gathering = PromptGathering(self.scheduler_config.prefill_schedule_interval - 1)
        # The planner is None if every step is vLLM's.
        self._planner: SteadyPlanner | None = None
        cause = unsteady_cause(self)
        if cause:
            self.disabled_features[STEADY] = cause
        else:
            self._planner = SteadyPlanner(self)
        self._draft_stats: SpecDecodingStats | None = None

    def add_request(self, request: Request) -> None:
        """Overrides vLLM's method; opens the request's chunk."""
        super().add_request(request)
        parameters = request.sampling_params
        if parameters is None:
            return
        wants_logprobs = parameters.num_logprobs is not None
        # A reader of parts waits for a chunk; cumulative outputs are vLLM's, for comparisons.
        if parameters.output_kind is RequestOutputKind.CUMULATIVE or parameters.num_logprobs:
            if wants_logprobs:
                self._streamed.add(request.request_id)
            return
        # The first chunks differ in length, so that requests of one batch do not all output in the
        # same step.
        self._num_added += 1
        limit = 1 + self._num_added % CHUNK_TOKENS
        chunk = Chunk(request.client_index, limit, wants_logprobs, stops_of(request, parameters))
        self._chunks[request.request_id] = chunk

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Overrides vLLM's method; drops the tokens that are held for these requests."""
        self._release()
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._forget(request.request_id)
        return finished

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Overrides vLLM's method; prompts wait as long as `PromptGathering` says.

        When a step has no room for all gathered prompts, vLLM takes the rest in the next step. All
        but prompts is planned by the `SteadyPlanner` where it can.
        """
        along = takes_a_prompt(self.running, self.waiting)
        num_ready = 0 if along else len(self.waiting)
        holds = self._gathering.holds(num_ready=num_ready, num_replies=len(self.running))
        takes = bool(self.waiting) and (not holds or self.prefill_capacity_bound)
        if self._planner and not throttle_prefills:
            plan = self._planner.plan(self._chunks, super().schedule, takes_prompts=takes)
            if plan is not None:
                return plan
        self._release()
        return super().schedule(throttle_prefills or holds)

    def _release(self) -> None:
        """Has all requests as vLLM would have left them."""
        if self._planner is not None:
            self._planner.release()

    def has_requests(self) -> bool:
        """Overrides vLLM's method; also returns True while a pause must output held tokens."""
        return bool(super().has_requests()) or (
            self.pause_state is PauseState.PAUSED_ALL and next(self._held(), None) is not None
        )

    def make_stats(
        self,
        *args: Any,  # noqa: ANN401 - vLLM's own
        **kwargs: Any,  # noqa: ANN401 - vLLM's own
    ) -> SchedulerStats | None:
        """Overrides vLLM's method; returns statistics at most once in `STATS_S` seconds, else None.

        When no request is left, it returns statistics in any case. They have the counts of drafts
        since the statistics before.
        """
        now_s = time.monotonic()
        if now_s < self._next_stats_s and self.requests:
            return None
        self._next_stats_s = now_s + STATS_S
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            stats.spec_decoding_stats = self._draft_stats
            self._draft_stats = None
        return stats

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> None:
        """Overrides vLLM's method; counts a request's drafted and accepted tokens in a step."""
        if self._draft_stats is None:
            self._draft_stats = SpecDecodingStats.new(self.num_spec_tokens)
        self._draft_stats.observe_draft(num_draft_tokens, num_accepted_tokens)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - vLLM's own
        """Overrides vLLM's method, which visits all blocks, to visit only the cached blocks.

        Only cached blocks have anything to reset, and the engine is paused meanwhile.
        """
        self._release()
        pool = self.kv_cache_manager.block_pool
        every = pool.blocks
        if not pool._reuse_watchers:
            cached_blocks = pool.cached_block_hash_to_block._cache.values()
            groups = (
                entry.values() if isinstance(entry, dict) else (entry,) for entry in cached_blocks
            )
            pool.blocks = list(chain.from_iterable(groups))
        try:
            return bool(super().reset_prefix_cache(*args, **kwargs))
        finally:
            pool.blocks = every

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Overrides the engine's method; the first step after it is vLLM's to plan."""
        self._release()
        super().set_pause_state(pause_state)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Overrides vLLM's method; leaves out the outputs of requests whose chunk is not full."""
        logprobs = model_runner_output.logprobs
        if logprobs is not None and not self._streamed:
            model_runner_output.logprobs = None
        values = None if logprobs is None else logprobs.logprobs[:, 0]
        starts = None if logprobs is None else logprobs.cu_num_generated_tokens
        batch = None if self._planner is None else self._planner.batch
        num_scheduled: dict[str, int] = scheduler_output.num_scheduled_tokens
        full: list[int] = []
        if batch is not None:
            if starts is None and not model_runner_output.num_nans_in_logits:
                num_scheduled, full = batch.take(num_scheduled, model_runner_output, values)
                # vLLM gets only the requests that the batch has not handled.
                scheduler_output = dataclasses.replace(
                    scheduler_output, num_scheduled_tokens=num_scheduled
                )
            changed = [
                *full,
                *(
                    batch.row_of[request_id]
                    for request_id in num_scheduled
                    if request_id in batch.row_of
                ),
            ]
            batch.sync(changed)
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        rows = model_runner_output.req_id_to_index
        for outputs in by_client.values():
            outputs.outputs = self._join(outputs.outputs, rows, values, starts)
        if batch is not None:
            for row in full:
                request, chunk = batch.members[row]
                outputs = by_client.setdefault(chunk.client_index, EngineCoreOutputs())
                outputs.outputs.append(chunk.pour(EngineCoreOutput(request.request_id, [])))
            for row in changed:
                batch.settle(row)
        if self.pause_state is PauseState.PAUSED_ALL:
            for request_id, chunk in list(self._held()):
                outputs = by_client.setdefault(chunk.client_index, EngineCoreOutputs())
                outputs.outputs.append(chunk.pour(EngineCoreOutput(request_id, [])))
        return {
            client: outputs
            for client, outputs in by_client.items()
            if outputs.outputs or outputs.finished_requests or outputs.scheduler_stats
        }

    def _join(
        self,
        outputs: list[EngineCoreOutput],
        rows: dict[str, int],
        logprobs: np.ndarray | None,
        starts: list[int] | None,
    ) -> list[EngineCoreOutput]:
        """Adds outputs to their requests' chunks; returns the outputs to send in this step.

        `logprobs` has a value for each sampled token. The values of a request begin at its row in
        `rows` or, if `starts` is given, at `starts[row]`.
        """
        ready = []
        for output in outputs:
            request_id = output.request_id
            token_ids = output.new_token_ids
            chunk = self._chunks.get(request_id)
            if chunk is None:
                ready.append(output)
                if output.finish_reason is not None:
                    self._forget(request_id)
                continue
            if logprobs is not None and token_ids and chunk.with_logprobs:
                row = rows[request_id]
                start = row if starts is None else starts[row]
                chunk.logprobs += logprobs[start : start + len(token_ids)].tolist()
            chunk.token_ids += token_ids
            chunk.keep(output)
            if output.finish_reason is not None:
                self._forget(request_id)
            elif len(chunk.token_ids) < chunk.limit:
                continue
            ready.append(chunk.pour(output))
        return ready

    def _held(self) -> Iterator[tuple[str, Chunk]]:
        return ((name, chunk) for name, chunk in self._chunks.items() if chunk.token_ids)

    def _forget(self, request_id: str) -> None:
        self._chunks.pop(request_id, None)
        self._streamed.discard(request_id)


class AsyncChunkingScheduler(ChunkingScheduler, AsyncEngineScheduler):
    """The asynchronous scheduler with chunks; it plans a step while the previous step runs."""


def scheduler_class(engine_class: type[EngineScheduler]) -> type[EngineScheduler]:
    """Returns the class for vLLM's `scheduler_cls` in place of `engine_class`.

    Raises ConfigError if the fields of vLLM's outputs are not those that this module handles, and
    if another extension has changed the scheduler.
    """
    if different := sorted(_FIELDS.symmetric_difference(EngineCoreOutput.__struct_fields__)):
        names = ", ".join(different)
        raise ConfigError(f"this vLLM's engine outputs differ from 0.32.0's in: {names}")
    chunking: dict[type[EngineScheduler], type[EngineScheduler]] = {
        EngineScheduler: ChunkingScheduler,
        AsyncEngineScheduler: AsyncChunkingScheduler,
    }
    if engine_class not in chunking:
        raise ConfigError(
            f"fast_decoding cannot stand behind another extension's scheduler, {engine_class!r}"
        )
    return chunking[engine_class]
