"""vLLM's scheduler with drafts of replies that it looks up itself, and counts of how drafts fare.

vLLM verifies a draft in one step: it samples the token behind each drafted one, and keeps the
sampled tokens up to the first that differs. Whatever a draft says, replies and log-probabilities
are those of the model. All tokens of a step are sampled by that step's weights, so that a draft
made before an update is verified by the new ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from slipstream.protocol.settings.sections import RolloutServerSection
from slipstream.rollout_server.inference.draft_index import DraftIndex
from slipstream.rollout_server.inference.draft_rule import MOST_STEP_TOKENS, DraftRule
from slipstream.rollout_server.inference.pausing_scheduler import PausingScheduler
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

log = logging.getLogger(__name__)

# Most episodes of an engine with drafts: one drafted token for each fills a step.
MOST_EPISODES = MOST_STEP_TOKENS // 2
_PROPOSER = f"{__name__}.NoProposer"
# Shortest and longest run of tokens that vLLM's own proposer looks for in a reply and its prompt.
_RUNS = (3, 8)


def draft_values(section: RolloutServerSection) -> dict[str, object]:
    """Returns vLLM's arguments for the drafts that `rollout_server.drafts` asks for."""
    if section.drafts == "off":
        return {}
    if section.max_episodes > MOST_EPISODES:
        log.warning(
            "nothing is drafted: it would not pay for rollout_server.max_episodes > %d, got %d",
            *(MOST_EPISODES, section.max_episodes),
        )
        return {}
    method: dict[str, object] = {"method": "custom_class", "model": _PROPOSER}
    if section.drafts == "ngram":
        shortest, longest = _RUNS
        method = {
            "method": "ngram",
            "prompt_lookup_min": shortest,
            "prompt_lookup_max": longest,
        }
    drafts = {**method, "num_speculative_tokens": section.draft_tokens}
    return {"speculative_config": drafts}


class NoProposer:
    """The worker's part of drafts that the scheduler makes: none.

    vLLM's workers know tokens, but not which requests share a prompt, and each would look up all.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        """See vLLM, which makes one in each worker."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        *args: Any,  # noqa: ANN401 - vLLM's own
        **kwargs: Any,  # noqa: ANN401 - vLLM's own
    ) -> list[list[int]]:
        """See vLLM; returns an empty draft for each request."""
        return [[] for _ in sampled_token_ids]

    def load_model(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own
        """See vLLM; loads nothing."""


class DraftingScheduler(PausingScheduler):
    """Gives running requests drafts as `DraftRule` allows; without drafts in vLLM's settings: none.

    Consumes the tokens of each step; produces `Request.spec_token_ids` for the next one.
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
        self._sampled = 0
        self._index: DraftIndex | None = None
        self._draft_stats: SpecDecodingStats | None = None
        if drafts is None:
            return
        if drafts.method == "custom_class":
            self._index = DraftIndex(self.num_spec_tokens)
        # vLLM would draft tokens of -1 behind a prompt of which one token is left to compute. It
        # does not if the length of drafts may change.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """See vLLM; in place of the workers' drafts come those of the index, if there is one."""
        length = self._rule.next_length(num_replies=len(self.running), sampled=self._sampled)
        names = draft_token_ids.req_ids
        drafts = [tokens[:length] for tokens in draft_token_ids.draft_token_ids]
        if self._index is not None:
            names = [request.request_id for request in self.running]
            drafts = [self._draft(self._index, request, length) for request in self.running]
        super().update_draft_token_ids(DraftTokenIds(names, drafts))

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """See vLLM; the index keeps what the requests have sampled."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        self._close(request.request_id for request in finished)
        return finished

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See vLLM; the index keeps what ended requests have sampled."""
        self._sampled = sum(map(len, model_runner_output.sampled_token_ids))
        by_client: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        if self._index is not None:
            self._close(
                output.request_id
                for outputs in by_client.values()
                for output in outputs.outputs
                if output.finish_reason is not None
            )
        return by_client

    def with_draft_counts(
        self, by_client: dict[int, EngineCoreOutputs]
    ) -> dict[int, EngineCoreOutputs]:
        """Puts the counts of drafts since the last outputs into the first of these, if any."""
        if by_client and self._draft_stats is not None:
            next(iter(by_client.values())).scheduler_stats = SchedulerStats(
                spec_decoding_stats=self._draft_stats
            )
            self._draft_stats = None
        return by_client

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: Mapping[str, int] | None,
        request_id: str,
    ) -> None:
        """See vLLM; counts the drafted and accepted tokens of a request in a step."""
        if self._draft_stats is None:
            self._draft_stats = SpecDecodingStats.new(self.num_spec_tokens)
        self._draft_stats.observe_draft(num_draft_tokens, num_accepted_tokens)

    def _draft(self, index: DraftIndex, request: Request, length: int) -> list[int]:
        # The last token of a reply needs no draft behind it.
        most = min(length, request.max_tokens - request.num_output_tokens - 1)
        if most <= 0:
            return []
        tokens, num_prompt = request._all_token_ids, request.num_prompt_tokens
        return index.draft(request.request_id, tokens, num_prompt=num_prompt, most=most)

    def _close(self, request_ids: Iterable[str]) -> None:
        if self._index is not None:
            for request_id in request_ids:
                self._index.close(request_id)
