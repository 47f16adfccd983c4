"""OpenTelemetry spans of each group, step and publish.

The ids of traces and spans are hashes of names that controller and rollout servers both know: a
group, a member and its attempt, a publish. So they exchange no trace context.

Consumes: finished spans. Produces: OTLP over HTTP, from a thread of the SDK. Waits for: nothing
until the end, and then `CLOSE_LIMIT_S` at most. When the collector is slow or unreachable, spans
are dropped, and the log says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

Attributes: TypeAlias = Mapping[str, str | int | float | bool]

# Spans that wait for the exporter; more are dropped.
MAX_WAITING = 65_536
# Seconds in which the collector must take a message.
EXPORT_LIMIT_S = 5.0
# Seconds in which the collector must take the remaining spans at the end: a scheduler that stops a
# process kills it soon, and a rollout server has an engine to close.
CLOSE_LIMIT_S = 3.0

log = logging.getLogger(__name__)


class NamedIds(IdGenerator):
    """Generates the ids that were last assigned to its attributes `trace` and `span`."""

    trace = span = 1

    def generate_trace_id(self) -> int:
        """Returns the chosen id of the trace."""
        return self.trace

    def generate_span_id(self) -> int:
        """Returns the chosen id of the span."""
        return self.span


class Traces:
    """Sends the spans of one process of a run; belongs to one thread, and never blocks it."""

    def __init__(self, url: str, run_id: str, service: str, server: str = "") -> None:
        """Takes the collector's OTLP endpoint, the role (`service`) and a rollout server's name."""
        self._run_id, self._ids = run_id, NamedIds()
        names = {"service.name": f"slipstream_{service}", "slipstream.run": run_id}
        if server:
            names["service.instance.id"] = server
        # No sampler of the environment may drop a part of a group.
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create(names),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_LIMIT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_WAITING))
        self._tracer = self._provider.get_tracer("slipstream")

    def span(
        self,
        trace: str,
        name: str,
        key: str,
        *,
        begin_s: float,
        end_s: float | None = None,
        parent: str = "",
        attributes: Attributes | None = None,
        error: str = "",
        links: Sequence[str] = (),
    ) -> None:
        """Sends a finished span from `begin_s` to `end_s` (default: now), in Unix seconds.

        `trace` is "group/ID", "step/N" or "publish/ID". `key` names the span within the trace, and
        is "" for the root span; `parent` is the key of the parent span. `links` names the traces to
        whose root spans this span links. A nonempty `error` sets this span's status to ERROR.
        """
        self._ids.trace, self._ids.span = self._trace_id(trace), self._span_id(trace, key)
        context = None
        if key:
            above = self._context(trace, parent)
            context = set_span_in_context(NonRecordingSpan(above))
        span = self._tracer.start_span(
            name,
            context=context,
            start_time=_ns(begin_s),
            attributes=dict(attributes or {}),
            links=[Link(self._context(other, "")) for other in links],
        )
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_ns(time.time() if end_s is None else end_s))

    async def aclose(self) -> None:
        """Sends the remaining spans; logs a warning if `CLOSE_LIMIT_S` is not enough for them."""
        # The SDK's own limit is half a minute. Its end must not wait for this thread.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_LIMIT_S)
        if closing.is_alive():
            log.warning("the collector of traces did not take the last spans in time")

    def _context(self, trace: str, key: str) -> SpanContext:
        return SpanContext(
            self._trace_id(trace),
            self._span_id(trace, key),
            is_remote=True,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )

    def _trace_id(self, trace: str) -> int:
        return _number(f"{self._run_id}/{trace}", 16)

    def _span_id(self, trace: str, key: str) -> int:
        return _number(f"{self._run_id}/{trace}/{key}", 8)


def _number(text: str, num_bytes: int) -> int:
    # 0 stands for no id.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=num_bytes).digest()) or 1


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
