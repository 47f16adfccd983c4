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
from typing import Any, Protocol

import numpy as np
from slipstream.core.errors import ConfigError
from slipstream.core.extension import installed, resolve
from slipstream.rollout_server.engine_rules import PromptGathering
from slipstream.rollout_server.vllm.steady_decoding import (
    CHUNK_TOKENS,
    Chunk,
    SteadyPlanner,
    decodes_plainly,
    stops_of,
    takes_a_prompt,
)
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
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

# Worker classes that record experts or kept tokens on CPUs, where vLLM's own scheduler never asks
# for them.
_CPU_MODULE = "slipstream.rollout_server.vllm.cpu"
_ROUTING_WORKER = f"{_CPU_MODULE}.RoutingWorker"
_KEPT_TOKENS_WORKER = f"{_CPU_MODULE}.KeptTokensWorker"
_KEPT_TOKENS_ROUTING_WORKER = f"{_CPU_MODULE}.KeptTokensRoutingWorker"


def cpu_worker(*, records_experts: bool, records_kept_tokens: bool) -> str | None:
    """Returns the name of the worker class that makes these records on CPUs; None for vLLM's."""
    if records_experts:
        return _KEPT_TOKENS_ROUTING_WORKER if records_kept_tokens else _ROUTING_WORKER
    return _KEPT_TOKENS_WORKER if records_kept_tokens else None


class DraftSwitch(Protocol):
    """Decides with how many requests at a time the engine drafts."""

    # The length of drafts by the number of requests, as vLLM's scheduler reads it.
    lookup: list[int]

    def end_step(self, num_requests: int, num_tokens: int, *, drafts: bool, now_s: float) -> None:
        """Notes a step of `num_requests`, which sampled `num_tokens`, and whether it drafted."""

    def pause(self) -> None:
        """Notes that the next step does not follow at once."""


class ChunkingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's synchronous scheduler, which outputs the tokens of a reply in chunks.

    Requests for top log-probabilities or cumulative outputs get each token at once. For others
    `add_request` opens a chunk, and `update_from_output` fills it and outputs it when it is full or
    the request ends. A pause outputs all chunks; `finish_requests` drops a request's chunk.

    vLLM verifies drafts in one step: it samples the token after each drafted token, and keeps the
    sampled tokens up to the first that differs. All tokens of a step are sampled by that step's
    weights, so a draft made before an update is verified by the new weights.
    """

    dynamic_sd_lookup: list[int] | None

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
        worker = self.vllm_config.parallel_config.worker_cls
        if worker in (_KEPT_TOKENS_WORKER, _KEPT_TOKENS_ROUTING_WORKER):
            self.return_sampling_mask = True
        if worker in (_ROUTING_WORKER, _KEPT_TOKENS_ROUTING_WORKER):
            self.aux_output_connector = AuxOutputSchedulerConnector()
        self._chunks: dict[str, Chunk] = {}
        # Requests without a chunk, whose log-probabilities vLLM itself must extract.
        self._streamed: set[str] = set()
        self._num_added = 0
        self._next_stats_s = 0.0
        self._gathering = PromptGathering(self.scheduler_config.prefill_schedule_interval - 1)
        # The planner is None if every step is vLLM's.
        self._planner = SteadyPlanner(self) if decodes_plainly(self) else None
        self._draft_stats: SpecDecodingStats | None = None
        # vLLM would draft tokens of -1 after a prompt of which one token is left to compute, unless
        # the length of drafts may change.
        if self.num_spec_tokens and self.dynamic_sd_lookup is None:
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        self._switch = draft_switch(self.vllm_config, self.num_spec_tokens)
        if self._switch is not None:
            self.dynamic_sd_lookup = self._switch.lookup

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
        """Overrides vLLM's method, to discard the cached prefixes of an engine that was not paused.

        An engine that is resumed without a pause has new weights too.
        """
        self._release()
        resumes = pause_state is PauseState.UNPAUSED
        if resumes and self.pause_state is PauseState.UNPAUSED:
            self.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if self._switch is not None:
            self._switch.pause()
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
        if self._switch is not None:
            self._note_step(self._switch, scheduler_output, model_runner_output)
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

    def _note_step(
        self, switch: DraftSwitch, planned: SchedulerOutput, done: ModelRunnerOutput
    ) -> None:
        requests = len(planned.num_scheduled_tokens)
        if not requests or self.pause_state is not PauseState.UNPAUSED or len(self.requests) == 0:
            switch.pause()
            return
        switch.end_step(
            requests,
            sum(map(len, done.sampled_token_ids)),
            drafts=planned.num_spec_tokens_to_schedule > 0,
            now_s=time.monotonic(),
        )

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


class AsyncChunkingScheduler(ChunkingScheduler, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler with chunks; it plans a step while the previous step runs."""


def draft_switch(settings: VllmConfig, num_tokens: int) -> DraftSwitch | None:
    """Returns what decides about drafts of `num_tokens`, None if the engine always drafts."""
    for extension in installed():
        if extension.draft_switch:
            switch: DraftSwitch | None = resolve(extension.draft_switch)(settings, num_tokens)
            if switch is not None:
                return switch
    return None


def scheduler_class(*, async_scheduling: bool) -> type[Scheduler]:
    """Returns the class for vLLM's `scheduler_cls`.

    Raises ConfigError if the fields of vLLM's outputs are not those that this module handles.
    """
    if different := sorted(_FIELDS.symmetric_difference(EngineCoreOutput.__struct_fields__)):
        names = ", ".join(different)
        raise ConfigError(f"this vLLM's engine outputs differ from 0.32.0's in: {names}")
    return AsyncChunkingScheduler if async_scheduling else ChunkingScheduler
