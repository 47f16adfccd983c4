"""vLLM's loop around a scheduler of its own or of ours, with a model that is a table of numbers."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, SamplingMaskLists
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
PROMPT = list(range(4, 14))
LIMITS = [1, 2, 15, 16, 17, 40, 60, 61]


@dataclass
class Engine:
    """vLLM's loop around a scheduler; every sampled token is a number of its own."""

    scheduler: Any
    depth: int
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    # The tokens that each token was drawn from, if the scheduler asks for them.
    kept_sets: dict[str, list[list[int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    finished: dict[str, str] = field(default_factory=dict)
    sampled: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    sizes: list[int] = field(default_factory=list)
    messages: int = 0
    preempted: int = 0
    # Statistics that came once a second, and with what is drafted.
    stats: list[Any] = field(default_factory=list)
    plans: list[Any] = field(default_factory=list)
    _queue: deque[tuple[Any, Any]] = field(default_factory=deque)
    _computed: dict[str, int] = field(default_factory=dict)

    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self._queue)

    def step(self) -> None:
        if self.scheduler.has_requests():
            plan = self.scheduler.schedule()
            self.preempted += len(plan.preempted_req_ids or ())
            self.plans.append(self._picture(plan))
            self._queue.append((plan, self._run(plan)))
            if len(self._queue) < self.depth and plan.total_num_scheduled_tokens:
                return
        if self._queue:
            for outputs in self.scheduler.update_from_output(
                *self._queue.popleft()
            ).values():
                self.messages += 1
                if outputs.scheduler_stats is not None:
                    self.stats.append(outputs.scheduler_stats)
                for output in outputs.outputs:
                    self._take(output)

    def state(self) -> Any:  # noqa: ANN401 - vLLM's
        """What the cache and the requests look like, when ours has brought them up to date."""
        if (planner := getattr(self.scheduler, "_planner", None)) and planner.batch:
            planner.batch.sync([*planner.batch.row_of.values()])
        (blocks,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        pool = blocks.block_pool
        return (
            {
                name: [b.block_id for b in blocks_of_request]
                for name, blocks_of_request in blocks.req_to_blocks.items()
            },
            dict(blocks.num_cached_block),
            [(b.block_id, b.block_hash) for b in pool.blocks],
            [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
            {
                name: (
                    (
                        request.status,
                        request.prefill_stats is None,
                        len(request.events),
                    ),
                    (request.num_computed_tokens, request.num_output_placeholders),
                    (request.num_in_flight_tokens, request.num_stale_output_tokens),
                    (request.is_prefill_chunk, request.next_decode_eligible_step),
                    (list(request.all_token_ids), list(request.block_hashes)),
                )
                for name, request in self.scheduler.requests.items()
            },
        )

    def _picture(self, plan: Any) -> Any:  # noqa: ANN401 - vLLM's
        new = [
            (n.req_id, n.block_ids, n.num_computed_tokens)
            for n in plan.scheduled_new_reqs
        ]
        gone = (plan.finished_req_ids, plan.preempted_req_ids)
        scheduled = dict(plan.num_scheduled_tokens)
        # Ours has them up to date in no other steps, as in an engine.
        state = None if len(self.plans) % 7 else self.state()
        return new, plan.scheduled_cached_reqs, scheduled, gone, state

    def drain(self) -> None:
        for _ in range(2000):
            if not self.has_work():
                return
            self.step()
        raise AssertionError("the scheduler never runs out of work")

    def _run(self, plan: Any) -> Any:  # noqa: ANN401 - vLLM's
        names = list(plan.num_scheduled_tokens)
        for new in plan.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        self._computed |= dict(
            zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        )
        ids: list[list[int]] = []
        for name in names:
            request = self.scheduler.requests[name]
            end = self._computed[name] + plan.num_scheduled_tokens[name]
            # Within a prompt, or within a reply that is computed again.
            if end < request.num_tokens:
                ids.append([])
                continue
            # The sampled token depends on the position alone: also when it is computed again.
            ids.append([100 + end])
            self.sampled[name] = max(self.sampled[name], end + 1 - len(PROMPT))
        values = [
            float(np.float32(-1 / (1 + sum(map(ord, n)) + sum(i))))
            for n, i in zip(names, ids, strict=True)
        ]
        column = np.asarray(values, dtype=np.float32)[:, None]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=ids,
            logprobs=LogprobsLists(
                np.asarray([i[0] if i else 0 for i in ids], dtype=np.int32)[:, None],
                column,
                np.ones(len(names), dtype=np.int32),
            )
            if names
            else None,
            sampling_masks=kept_sets_of(ids)
            if self.scheduler.return_sampling_mask
            else None,
        )

    def _take(self, output: Any) -> None:  # noqa: ANN401 - vLLM's
        name = output.request_id
        assert name not in self.finished
        self.sizes.append(len(output.new_token_ids))
        self.tokens[name] += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs[name] += output.new_logprobs.logprobs[:, 0].tolist()
            assert (
                output.new_logprobs.logprob_token_ids[:, 0].tolist()
                == output.new_token_ids
            )
        if output.new_sampling_mask is not None:
            self.kept_sets[name] += output.new_sampling_mask.to_nested_list()
        if output.finish_reason is not None:
            self.finished[name] = str(output.finish_reason)


def kept_sets_of(sampled: list[list[int]]) -> SamplingMaskLists:
    """Returns a set of one to five ids for each sampled token, and an empty one without a token."""
    sets: list[list[int]] = []
    for ids in sampled:
        token_sets = [range(token - token % 5, token + 1) for token in ids]
        sets.append([*chain(*token_sets)])
    every_id = [*chain(*sets)]
    sizes = [len(ids) for ids in sets]
    return SamplingMaskLists(
        token_ids=np.asarray(every_id, dtype=np.int32),
        offsets=np.cumsum([0, *sizes]),
    )


def scheduler_of(
    cls: type, settings: Any, num_blocks: int, window: int | None = None
) -> Any:  # noqa: ANN401
    """A scheduler with one group of layers, which see `window` tokens or all."""
    sizes = {
        "block_size": BLOCK,
        "num_kv_heads": 1,
        "head_size": 32,
        "dtype": torch.float32,
    }
    spec = FullAttentionSpec(**sizes)
    if window is not None:
        spec = SlidingWindowSpec(**sizes, sliding_window=window)
    settings.cache_config.num_gpu_blocks = num_blocks
    return cls(
        vllm_config=settings,
        kv_cache_config=KVCacheConfig(
            num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(settings),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )


def add(
    engine: Engine,
    name: str,
    limit: int,
    *,
    prompt: list[int] = PROMPT,
    eos: int | None = None,
    **parameters: object,
) -> None:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    settings = {"logprobs": 0, "output_kind": RequestOutputKind.FINAL_ONLY} | parameters
    sampling = SamplingParams(max_tokens=limit, ignore_eos=eos is None, **settings)
    sampling.update_from_generation_config({}, eos)
    engine.scheduler.add_request(
        Request(name, list(prompt), sampling, None, block_hasher=hasher)
    )
