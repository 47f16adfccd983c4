"""Counts the tokens that vLLM hands out, and notes the time of the engine's last step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger

# Prefix of the ids of requests that score a probe and belong to no episode.
PROBE_PREFIX = "probe/"


class TokenCounter(PrometheusStatLogger):  # type: ignore[misc]
    """Counts the tokens that vLLM hands out, in place of its Prometheus metrics."""

    generated_tokens = 0
    # Tokens that were proposed before they were sampled, and those of them that were sampled.
    drafted_tokens = accepted_tokens = 0
    # time.monotonic of the engine's last report of a step.
    heard_s = 0.0

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        pass

    @classmethod
    def among(cls, loggers: Iterable[object]) -> TokenCounter:
        """Returns the only counter among vLLM's loggers."""
        (counter,) = (logger for logger in loggers if isinstance(logger, cls))
        return counter

    def record(
        self,
        scheduler_stats: Any,  # noqa: ANN401 - not a stable type of vLLM's
        iteration_stats: Any,  # noqa: ANN401 - not a stable type of vLLM's
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """See vLLM; counts the tokens of one step of the engine, without those of probes."""
        self.heard_s = time.monotonic()
        drafts = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        if drafts is not None:
            self.drafted_tokens += drafts.num_draft_tokens
            self.accepted_tokens += drafts.num_accepted_tokens
        if iteration_stats is None:
            return
        self.generated_tokens += iteration_stats.num_generation_tokens
        for request in iteration_stats.finished_requests:
            if request.request_id.startswith(PROBE_PREFIX):
                self.generated_tokens -= request.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """See vLLM; logs nothing."""

    def log(self) -> None:
        """See vLLM; logs nothing."""
