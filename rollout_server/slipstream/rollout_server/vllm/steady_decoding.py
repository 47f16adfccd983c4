"""Reduces the scheduler's work for requests in the middle of a reply, which get one token a step.

vLLM's scheduler supports drafts, grammars, images, connectors and sliding windows. It checks for
all of these once for each request and step, and goes through all requests three times. That is more
than half of the work of the engine's thread, and with a small model and hundreds of requests it
limits an engine. In the middle of a reply the results of these checks are known. So vLLM plans a
step without requests, which updates vLLM's own state; the requests are added to that plan, and
their state changes as vLLM would change it. vLLM still handles the first and the last step of a
reply, and all unusual steps.
"""

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm import __version__ as VERSION
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request, RequestStatus

log = logging.getLogger(__name__)
_RUNNING = RequestStatus.RUNNING
# The digest of vLLM 0.32.0's modules that this one follows; they are no public interface.
_FOLLOWED = "1e4a9d611bea13a4d06bf5e90383347a05a564c488df47325cf193f59d0e5f3d"
_SOURCES = (Scheduler, AsyncScheduler, KVCacheManager, FullAttentionManager, Request)


def decodes_plainly(scheduler: Scheduler, followed: str = _FOLLOWED) -> bool:
    """Returns whether `SteadyPlanner` does all that `scheduler` would do in a decoding step."""
    files = (Path(inspect.getfile(source)) for source in _SOURCES)
    if hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() != followed:
        log.warning("all steps are vLLM's: the scheduler of %s is not that of 0.32.0", VERSION)
        return False
    # Full attention frees no block, and each block that fills up is one unit of prefix lookup.
    simple_cache = all(
        type(manager) is FullAttentionManager and manager.block_size == scheduler.hash_block_size
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
    )
    others = (
        *(scheduler.connector, scheduler.ec_connector, scheduler.aux_output_connector),
        *(scheduler.num_lookahead_tokens, scheduler.num_spec_tokens, scheduler.has_mamba_layers),
        *(scheduler.return_sampling_mask, scheduler.is_mm_encoder_only, scheduler.use_pp),
        *(scheduler.needs_kv_cache_zeroing, scheduler.defer_block_free),
    )
    return (
        simple_cache
        and scheduler.num_sampled_tokens_per_step == 1
        and getattr(scheduler, "decode_stagger", 1) == 1
        and scheduler.dcp_world_size == scheduler.pcp_world_size == 1
        and not any(others)
    )


class SteadyRequest:
    """A request whose steps in the middle of its reply output a token and nothing else."""

    __slots__ = ("_ends_at", "_request", "_stops")

    def __init__(self, request: Request, parameters: SamplingParams, max_model_len: int) -> None:
        self._request = request
        self._stops = {parameters.eos_token_id, *(parameters.stop_token_ids or ())}
        self._ends_at = min(max_model_len, request.num_prompt_tokens + request.max_tokens)

    @staticmethod
    def fits(request: Request, parameters: SamplingParams) -> bool:
        """Returns whether `request` needs only tokens: no grammar, images or other extras."""
        return not (
            request.use_structured_output
            or request.has_encoder_inputs
            or request.resumable
            or parameters.repetition_detection is not None
        )

    def is_between(self, token_ids: list[int]) -> bool:
        """Returns whether a step sampled one token, which neither starts nor ends the reply."""
        request = self._request
        return (
            len(token_ids) == 1
            and request.status is _RUNNING
            and request.prefill_stats is None
            and not request.num_stale_output_tokens
            and not request.events
            and token_ids[0] not in self._stops
            and request.num_tokens + 1 < self._ends_at
        )

    def append(self, token_id: int) -> None:
        """Appends a token for which `is_between` is true."""
        request = self._request
        request.num_in_flight_tokens -= 1
        request.append_output_token_ids(token_id)

    def append_ahead(self, token_id: int, manager: KVCacheManager, block_size: int) -> None:
        """Appends a token as `append` does, for a scheduler that plans steps ahead.

        Also takes one from vLLM's count of planned tokens, and caches a block that is now complete.
        """
        self.append(token_id)
        request = self._request
        request.num_output_placeholders -= 1
        num_known = request.num_computed_tokens - request.num_output_placeholders
        if not num_known % block_size:
            manager.cache_blocks(request, num_known)


class SteadyPlanner:
    """Plans steps that only decode, for a scheduler for which `decodes_plainly` is true."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._block_size = scheduler.hash_block_size
        self._num_groups = len(self._manager.coordinator.single_type_managers)
        self._nobody = create_request_queue(scheduler.policy)
        # Whether a step is planned before the tokens of the previous step are known.
        self.ahead = isinstance(scheduler, AsyncScheduler)
        self._most_tokens = min(
            scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens
        )

    def steady_requests(self, steady: Callable[[str], bool]) -> list[Request]:
        """Returns the running requests if the next step only decodes them, else [].

        For [] vLLM must plan the step. `steady` says for a request's id whether its next output is
        nothing but a token.
        """
        scheduler = self._scheduler
        running: list[Request] = scheduler.running
        if (
            scheduler.pause_state is not PauseState.UNPAUSED
            or scheduler.kv_holding_waiting
            or len(running) > self._most_tokens
        ):
            return []
        longest, block_size = scheduler.max_model_len - 1, self._block_size
        # vLLM's older worker must be sent all tokens of a request that was left out of a step.
        known = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids
        requests: list[Request] = []
        num_blocks = 0
        # This loop runs once for each request and step, so it does as little as possible.
        for request in running:
            computed, ahead = request.num_computed_tokens, request.num_output_placeholders
            if computed >= longest or (
                ahead and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens
            ):
                # The request's last token is already being sampled.
                continue
            if (
                request.num_tokens + ahead - computed != 1
                or not steady(request.request_id)
                or (known is not None and request.request_id not in known)
            ):
                return []
            if not computed % block_size:
                num_blocks += 1
            requests.append(request)
        free = self._manager.block_pool.get_num_free_blocks()
        return requests if num_blocks * self._num_groups <= free else []

    def plan(
        self, requests: Iterable[Request], schedule: Callable[[], SchedulerOutput]
    ) -> SchedulerOutput:
        """Plans a step of `requests` from `steady_requests`; `schedule` is vLLM's own method."""
        scheduler = self._scheduler
        running, waiting = scheduler.running, scheduler.waiting
        scheduler.running, scheduler.waiting = [], self._nobody
        try:
            plan = schedule()
        finally:
            scheduler.running, scheduler.waiting = running, waiting
        manager, block_size = self._manager, self._block_size
        cached = plan.scheduled_cached_reqs
        cached.req_ids = [request.request_id for request in requests]
        cached.num_computed_tokens = [request.num_computed_tokens for request in requests]
        cached.num_output_tokens = [
            request.num_output_tokens + request.num_output_placeholders for request in requests
        ]
        blocks: list[Any] = []
        step = scheduler.current_step
        for request in requests:
            computed = request.num_computed_tokens
            if 0 < computed % block_size < block_size - 1:
                blocks.append(None)
            else:
                new = manager.allocate_slots(request, 1, num_lookahead_tokens=0)
                blocks.append(new.get_block_ids(allow_none=True))
            request.num_computed_tokens = computed + 1
            request.num_in_flight_tokens += 1
            if self.ahead:
                request.num_output_placeholders += 1
                if scheduler.use_v2_model_runner:
                    request.next_decode_eligible_step = step + 1
        cached.new_block_ids = blocks
        plan.num_scheduled_tokens = dict.fromkeys(cached.req_ids, 1)
        plan.total_num_scheduled_tokens = len(blocks)
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.update(cached.req_ids)
        return plan


def takes_a_prompt(running: Iterable[Request], waiting: Iterable[Request]) -> bool:
    """Returns whether the next step has a prefill in any case, which other prompts may then join.

    This is so in the middle of a chunked prefill, or when a waiting request asks for
    log-probabilities of its prompt: such requests are probes of new weights.
    """
    return any(request.is_prefill_chunk for request in running) or any(
        request.sampling_params and request.sampling_params.prompt_logprobs is not None
        for request in waiting
    )
