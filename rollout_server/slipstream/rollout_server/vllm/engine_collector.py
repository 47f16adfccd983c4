"""The load of vLLM's engine in Prometheus's words, at the moment of a scrape.

vLLM's own metrics would cost an observation for each token. Here are its newest statistics, which
its scheduler sends once a second while it works.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from slipstream.rollout_server.vllm.engine_requests import EngineRequests


class EngineCollector:
    """See `prometheus_client.registry.Collector`."""

    def __init__(self, requests: EngineRequests) -> None:
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        """Yields gauges as of the newest statistics, and counters."""
        counter = self._requests.counter
        # An engine without requests takes no step and sends nothing.
        num_open = self._requests.num_open
        works = num_open > 0
        gauges: dict[str, tuple[str, float]] = {
            "open_requests": ("Requests to the engine, held ones included.", num_open),
            "running_requests": ("Requests in the engine's steps.", counter.running * works),
            "waiting_requests": ("Requests that wait for a place.", counter.waiting * works),
            "kv_cache_usage_ratio": ("Used share of the KV cache.", counter.cache_usage * works),
        }
        counters = {
            "generated_tokens": ("Tokens that the engine handed out.", counter.generated_tokens),
            "prompt_tokens": ("Tokens of prompts.", counter.prompt_tokens),
            "prefix_looked_up_tokens": (
                "Tokens looked up in the prefix cache.",
                counter.looked_up_tokens,
            ),
            "prefix_found_tokens": ("Tokens found there.", counter.found_tokens),
            "preemptions": ("Requests whose memory was taken away.", counter.preemptions),
        }
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(f"slipstream_engine_{name}", meaning, value)
        for name, (meaning, total) in counters.items():
            yield CounterMetricFamily(f"slipstream_engine_{name}", meaning, total)
