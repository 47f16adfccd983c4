"""A rollout server's spans: episodes, their model calls, deliveries, loads of weights.

These spans belong to traces of groups and publishes, whose other spans the controller sends.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from slipstream.core.types import Purpose, Trajectory
from slipstream.rollout_server.episodes.lease import EpisodeTask
from slipstream.rollout_server.episodes.play import Spans
from slipstream.v1 import fleet_pb2

if TYPE_CHECKING:
    from slipstream.extensions.traces.exporter import Traces


class ServerTraces(Spans):
    """Sends the spans of training episodes and of publishes."""

    def __init__(self, traces: Traces, server: str = "") -> None:
        """Takes the exporter of spans, and the name of this rollout server."""
        self._traces, self._server = traces, server

    def call(self, task: EpisodeTask, number: int, *, begin_s: float, num_tokens: int) -> None:
        """Sends the span of model call `number` of the episode, which ends now."""
        if task.lease.purpose is not Purpose.TRAINING:
            return
        attempt = f"{task.member}.{task.attempt}"
        self._traces.span(
            f"group/{task.lease.group_id}",
            "call",
            f"call/{attempt}/{number}",
            parent=f"episode/{attempt}",
            begin_s=begin_s,
            attributes={"slipstream.tokens": num_tokens},
        )

    def episode(self, trajectory: Trajectory, *, begin_s: float) -> None:
        """Sends the span of an episode, which ends now."""
        if trajectory.purpose is not Purpose.TRAINING:
            return
        attributes: dict[str, str | float] = {
            "slipstream.member": trajectory.member,
            "slipstream.attempt": trajectory.attempt,
            "slipstream.status": trajectory.status.name.lower(),
            "slipstream.tokens": trajectory.num_sampled_tokens,
            "slipstream.turns": trajectory.num_turns,
            "slipstream.reward": trajectory.reward,
            "slipstream.generation_s": trajectory.generation_s,
            "slipstream.environment_s": trajectory.environment_s,
        }
        self._traces.span(
            f"group/{trajectory.group_id}",
            "episode",
            f"episode/{trajectory.member}.{trajectory.attempt}",
            begin_s=begin_s,
            attributes=attributes,
            error=trajectory.failure.message if trajectory.failure is not None else "",
        )

    def delivery(self, trajectory: Trajectory, *, begin_s: float) -> None:
        """Sends the span from an episode's end until now, when the queue has its trajectory."""
        if trajectory.purpose is not Purpose.TRAINING:
            return
        attempt = f"{trajectory.member}.{trajectory.attempt}"
        self._traces.span(
            f"group/{trajectory.group_id}",
            "delivery",
            f"delivery/{attempt}",
            parent=f"episode/{attempt}",
            begin_s=begin_s,
        )

    def publish(self, report: fleet_pb2.PublishReport) -> None:
        """Sends the spans of a publish if `report` says that it is served here or has failed."""
        phases = (fleet_pb2.PUBLISH_PHASE_SERVING, fleet_pb2.PUBLISH_PHASE_FAILED)
        if report.phase not in phases:
            return
        now_s, stages = time.time(), report.stages
        trace, load = f"publish/{report.publish_id}", f"load/{self._server}"
        failed = report.phase == fleet_pb2.PUBLISH_PHASE_FAILED
        self._traces.span(
            trace,
            "load",
            load,
            begin_s=now_s - report.paused_s - stages.prepare_s,
            end_s=now_s,
            attributes={
                f"slipstream.{name}": getattr(stages, name)
                for name in ("prepare_s", "pause_s", "receive_s", "load_s", "resume_s")
            },
            error=report.message if failed else "",
        )
        if report.paused_s:
            begin_s = now_s - report.paused_s
            self._traces.span(
                trace, "pause", f"pause/{self._server}", parent=load, begin_s=begin_s, end_s=now_s
            )
