"""Plans steady steps, in which every reply only gets its next token.

vLLM's scheduler goes through all requests three times for such a step, and checks each for prompts,
drafts, images and grammars. That is more than half of the work of the engine's thread. Here vLLM
plans a step without requests, which keeps its state right. The requests are then added to that plan
and left in the state in which vLLM would leave them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from slipstream.rollout_server.vllm.steady_decoding import plans_ahead
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


def takes_a_prompt(running: Iterable[Request], waiting: Iterable[Request]) -> bool:
    """Whether the next step computes a prompt in any case, so that others may join it.

    This is so while a long prompt is computed in several steps, or when a waiting prompt is to be
    scored: such prompts are probes of new weights.
    """
    return any(request.is_prefill_chunk for request in running) or any(
        request.sampling_params and request.sampling_params.prompt_logprobs is not None
        for request in waiting
    )


class SteadyPlanner:
    """Plans steady steps for a scheduler for which `decodes_plainly` is true."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._block_size = scheduler.hash_block_size
        self._num_groups = len(self._manager.coordinator.single_type_managers)
        self._nobody = create_request_queue(scheduler.policy)
        self._ahead = plans_ahead(scheduler)
        self._most_tokens = min(
            scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens
        )

    @staticmethod
    def fits(scheduler: Scheduler) -> bool:
        """Whether vLLM does nothing else in a steady step of this scheduler."""
        return not (
            scheduler.needs_kv_cache_zeroing
            or scheduler.defer_block_free
            or scheduler.use_pp
            or getattr(scheduler, "decode_stagger", 1) != 1
        )

    def steady_requests(self, steady: Callable[[str], bool]) -> list[Request]:
        """The requests of the next steady step; empty when vLLM must plan the next step.

        `steady` tells by a request's id whether its next output is only a token.
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
        """Plans a step of `requests`, found by `steady_requests`; `schedule` is vLLM's method."""
        scheduler = self._scheduler
        plan = self._plan_nothing(schedule)
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
            if self._ahead:
                request.num_output_placeholders += 1
                if scheduler.use_v2_model_runner:
                    request.next_decode_eligible_step = step + 1
        cached.new_block_ids = blocks
        plan.num_scheduled_tokens = dict.fromkeys(cached.req_ids, 1)
        plan.total_num_scheduled_tokens = len(blocks)
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.update(cached.req_ids)
        return plan

    def _plan_nothing(self, schedule: Callable[[], SchedulerOutput]) -> SchedulerOutput:
        scheduler = self._scheduler
        running, waiting = scheduler.running, scheduler.waiting
        scheduler.running, scheduler.waiting = [], self._nobody
        try:
            return schedule()
        finally:
            scheduler.running, scheduler.waiting = running, waiting
