"""vLLM's scheduler with shorter pauses, and with drafts of replies where they save time.

vLLM verifies a draft in one step: it samples the token after each drafted token, and keeps the
sampled tokens up to the first that differs. Drafts change neither the distribution of replies nor
the log-probabilities. All tokens of a step are sampled by that step's weights, so a draft made
before an update is verified by the new weights.
"""

import logging
from collections.abc import Mapping
from itertools import chain
from typing import Any

from slipstream.core.settings.sections import MOST_DRAFTED_EPISODES, RolloutServerSection
from slipstream.rollout_server.inference.draft_table import MOST_STEP_TOKENS, DraftRule
from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.spec_decode.metrics import SpecDecodingStats

log = logging.getLogger(__name__)
# Longest draft. With many replies under way drafts are shorter.
DRAFT_TOKENS = 4
# Classes that draft from the texts of all requests: a worker for GPUs, and a proposer for CPUs.
_WORKER = "slipstream.rollout_server.vllm.drafting_worker.DraftingWorker"
_PROPOSER = "slipstream.rollout_server.vllm.cpu_repairs.SharedTextProposer"


class PausingScheduler(Scheduler):  # type: ignore[misc]
    """Plans steps as vLLM's scheduler does; pauses and resumes faster."""

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - vLLM's own
        """Overrides vLLM's method, which visits all blocks, to visit only the cached blocks.

        Only cached blocks have anything to reset, and the engine is paused meanwhile.
        """
        pool = self.kv_cache_manager.block_pool
        every = pool.blocks
        if not pool._reuse_watchers:
            found = pool.cached_block_hash_to_block._cache.values()
            groups = (each.values() if isinstance(each, dict) else (each,) for each in found)
            pool.blocks = list(chain.from_iterable(groups))
        try:
            return bool(super().reset_prefix_cache(*args, **kwargs))
        finally:
            pool.blocks = every

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Overrides vLLM's method, to discard the cached prefixes of an engine that was not paused.

        An engine that is resumed without a pause has new weights too.
        """
        resumes = pause_state is PauseState.UNPAUSED
        if resumes and self.pause_state is PauseState.UNPAUSED:
            self.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        super().set_pause_state(pause_state)


def draft_values(section: RolloutServerSection, *, on_cpu: bool) -> dict[str, object]:
    """Returns vLLM's arguments for the drafts that `rollout_server.drafts` asks for.

    Returns {} without drafts, or with too many episodes for drafts to save time. On GPUs the
    workers make the drafts, which lets vLLM plan a step ahead.
    """
    if section.drafts == "off":
        return {}
    if section.max_episodes > MOST_DRAFTED_EPISODES:
        log.warning(
            "nothing is drafted: it would not pay for rollout_server.max_episodes > %d, got %d",
            *(MOST_DRAFTED_EPISODES, section.max_episodes),
        )
        return {}
    drafts: dict[str, object] = {"num_speculative_tokens": DRAFT_TOKENS}
    if on_cpu:
        return {"speculative_config": drafts | {"method": "custom_class", "model": _PROPOSER}}
    # vLLM plans ahead with this method, and it needs no second model; our worker drafts instead.
    drafts["method"] = "ngram_gpu"
    lengths = draft_lengths(DRAFT_TOKENS, section.max_episodes)
    # vLLM captures graphs only for the lengths in this table. `DraftRule` chooses the length of a
    # step; 0 is in the table for steps without drafts.
    drafts["num_speculative_tokens_per_batch_size"] = [
        (1, 1, 0 if len(lengths) > 2 else lengths[1]),
        *((size, size, length) for size, length in enumerate(lengths) if size > 1),
    ]
    return {"speculative_config": drafts, "worker_cls": _WORKER}


def draft_lengths(draft_tokens: int, most_replies: int) -> list[int]:
    """Returns the length of drafts, in tokens, for 0 to `most_replies` replies in a step."""
    return [
        max(0, min(draft_tokens, MOST_STEP_TOKENS // max(1, replies) - 1))
        for replies in range(most_replies + 1)
    ]


class DraftingScheduler(PausingScheduler):
    """Gives running requests drafts as `DraftRule` allows, if vLLM's settings have drafts.

    Workers draft after each step. With asynchronous scheduling the plan of a step has the length of
    its drafts; otherwise the scheduler truncates the workers' drafts.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *args: Any,  # noqa: ANN401 - vLLM's own
        **kwargs: Any,  # noqa: ANN401 - vLLM's own
    ) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        drafts = vllm_config.speculative_config
        self._rule = DraftRule(self.num_spec_tokens)
        self._sampled = self._num_steps = 0
        self._draft_stats: SpecDecodingStats | None = None
        self._lengths: list[int] | None = None
        if drafts is None:
            return
        if self.scheduler_config.async_scheduling:
            self._lengths = draft_lengths(self.num_spec_tokens, self.max_num_running_reqs)
        # vLLM would draft tokens of -1 after a prompt of which one token is left to compute, unless
        # the length of drafts may change.
        self.dynamic_sd_lookup = self._lengths or (
            [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        )

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Overrides vLLM's method, which only synchronous scheduling calls; truncates drafts."""
        length = self._next_length()
        drafts = [tokens[:length] for tokens in draft_token_ids.draft_token_ids]
        super().update_draft_token_ids(DraftTokenIds(draft_token_ids.req_ids, drafts))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Overrides vLLM's method; counts the steps, and sets the length of the next drafts."""
        self._sampled = sum(map(len, model_runner_output.sampled_token_ids))
        self._num_steps += self._sampled > 0
        by_client: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        if (lengths := self._lengths) is not None and scheduler_output.num_scheduled_tokens:
            self.dynamic_sd_lookup = lengths if self._next_length() else [0] * len(lengths)
        return by_client

    def make_stats(
        self,
        *args: Any,  # noqa: ANN401 - vLLM's own
        **kwargs: Any,  # noqa: ANN401 - vLLM's own
    ) -> SchedulerStats | None:
        """Overrides vLLM's method; reports the number of steps as `step_counter`.

        vLLM uses that field for data parallel engines only.
        """
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            stats.step_counter = self._num_steps
        return stats

    def with_draft_counts(
        self, by_client: dict[int, EngineCoreOutputs]
    ) -> dict[int, EngineCoreOutputs]:
        """Adds the draft counts since the last call to the first outputs; returns `by_client`."""
        if by_client and (drafts := self._draft_stats) is not None:
            first = next(iter(by_client.values()))
            stats = first.scheduler_stats or DraftingScheduler.make_stats(self)
            if stats is not None:
                first.scheduler_stats, self._draft_stats = stats, None
                stats.spec_decoding_stats = drafts
        return by_client

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: Mapping[str, int] | None,
        request_id: str,
    ) -> None:
        """Overrides vLLM's method; counts a request's drafted and accepted tokens in a step."""
        if self._draft_stats is None:
            self._draft_stats = SpecDecodingStats.new(self.num_spec_tokens)
        self._draft_stats.observe_draft(num_draft_tokens, num_accepted_tokens)

    def _next_length(self) -> int:
        return self._rule.next_length(num_replies=len(self.running), sampled=self._sampled)
