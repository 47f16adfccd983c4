"""Reduces the scheduler's work for requests in the middle of a reply, which get one token a step.

vLLM's scheduler is ready for much more: drafts, grammars, images, connectors, windows. It asks for
all of that once for each request and step. With a small model and hundreds of requests this is what
limits an engine. Here the answers are known beforehand, and the requests' state changes as vLLM
would change it. vLLM still handles the first and the last step of a reply, and all unusual steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import vllm
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request, RequestStatus

log = logging.getLogger(__name__)

_RUNNING = RequestStatus.RUNNING
# The version of vLLM whose scheduler this module follows; it is no public interface.
_FOLLOWED = "0.32.0"


def decodes_plainly(scheduler: Scheduler, version: str = vllm.__version__) -> bool:
    """Whether this module can handle requests of `scheduler` in the middle of a reply."""
    if version.partition("+")[0] != _FOLLOWED:
        log.warning("all steps are vLLM's: it is %s, not %s", version, _FOLLOWED)
        return False
    # Full attention frees no block, and each block that fills up is one unit of prefix lookup.
    simple_cache = all(
        type(manager) is FullAttentionManager and manager.block_size == scheduler.hash_block_size
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
    )
    others = (
        *(scheduler.connector, scheduler.ec_connector, scheduler.aux_output_connector),
        *(scheduler.num_lookahead_tokens, scheduler.num_spec_tokens, scheduler.has_mamba_layers),
        *(scheduler.return_sampling_mask, scheduler.is_mm_encoder_only),
    )
    return (
        simple_cache
        and scheduler.num_sampled_tokens_per_step == 1
        and scheduler.dcp_world_size == scheduler.pcp_world_size == 1
        and not any(others)
    )


class KnownSlots:
    """Replaces `KVCacheManager.allocate_slots`, whose answer is known inside of a block.

    A token that is neither the first nor the last of a block needs no new block, and fills none.
    """

    def __init__(self, manager: KVCacheManager, block_size: int) -> None:
        """`manager` belongs to a scheduler for which `decodes_plainly` is true."""
        self._allocate: Callable[..., KVCacheBlocks | None] = manager.allocate_slots
        self._none = manager.empty_kv_cache_blocks
        self._block_size = block_size
        self._last = block_size - 1

    def __call__(
        self,
        request: Request,
        num_new_tokens: int,
        *args: Any,  # noqa: ANN401 - vLLM's own
        **kwargs: Any,  # noqa: ANN401 - vLLM's own
    ) -> KVCacheBlocks | None:
        """Returns new blocks for the tokens; None when there are not enough."""
        if (
            num_new_tokens == 1
            and 0 < request.num_computed_tokens % self._block_size < self._last
            and request.status is _RUNNING
        ):
            return self._none
        return self._allocate(request, num_new_tokens, *args, **kwargs)


class SteadyRequest:
    """A request that gets nothing but tokens in the middle of its reply."""

    __slots__ = ("_ends_at", "_request", "_stops")

    def __init__(self, request: Request, parameters: SamplingParams, max_model_len: int) -> None:
        self._request = request
        self._stops = {parameters.eos_token_id, *(parameters.stop_token_ids or ())}
        self._ends_at = min(max_model_len, request.num_prompt_tokens + request.max_tokens)

    @staticmethod
    def fits(request: Request, parameters: SamplingParams) -> bool:
        """Whether `request` gets nothing but tokens."""
        return not (
            request.use_structured_output
            or request.has_encoder_inputs
            or request.resumable
            or parameters.repetition_detection is not None
        )

    def is_between(self, token_ids: list[int]) -> bool:
        """Whether a step sampled a single token, which neither starts nor ends the reply."""
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
        """Appends a token where steps are planned before it is known, see `AsyncScheduler`."""
        self.append(token_id)
        request = self._request
        request.num_output_placeholders -= 1
        num_known = request.num_computed_tokens - request.num_output_placeholders
        if not num_known % block_size:
            manager.cache_blocks(request, num_known)


def plans_ahead(scheduler: Scheduler) -> bool:
    """Whether `scheduler` plans a step before it knows the tokens of the step before."""
    return isinstance(scheduler, AsyncScheduler)
