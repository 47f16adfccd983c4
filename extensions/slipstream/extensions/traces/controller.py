"""The controller's spans."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from slipstream.core.types import GroupId, Purpose, Trajectory
from slipstream.learner.controller.run import RunSpans

if TYPE_CHECKING:
    from slipstream.extensions.traces.exporter import Traces

# Largest number of groups whose times are kept; the oldest groups are dropped first.
MAX_GROUPS = 65_536


class RunTraces(RunSpans):
    """Sends tracing spans of each group, from its lease to its step, and of each publish.

    A rollout server adds its own spans to the same traces: episodes, calls, deliveries, loads of
    weights.
    """

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        # Unix times of the first lease and of the completion.
        self._leased: dict[GroupId, float] = {}
        self._complete: dict[GroupId, float] = {}

    def leased(self, group_id: GroupId) -> None:
        """Stores the time of a group's first lease."""
        _keep(self._leased, group_id)

    def arrived(self, trajectory: Trajectory) -> None:
        """Sends a span of no duration for the arrival of a training trajectory."""
        if trajectory.purpose is not Purpose.TRAINING:
            return
        attempt = f"{trajectory.member}.{trajectory.attempt}"
        now_s = time.time()
        self._traces.span(
            f"group/{trajectory.group_id}",
            "arrival",
            f"arrival/{attempt}.{trajectory.server_epoch:x}",
            parent=f"episode/{attempt}",
            begin_s=now_s,
            end_s=now_s,
        )

    def completed(self, group_id: GroupId) -> None:
        """Stores the time at which a group became complete and began to wait for its batch."""
        _keep(self._complete, group_id)

    def stepped(
        self,
        version: int,
        groups: Iterable[tuple[GroupId, str, int]],
        *,
        begin_s: float,
        end_s: float,
    ) -> None:
        """Sends the spans of a step and of its `groups`: (id, environment, task index) of each.

        The step made `version`. It lasted from `begin_s` to `end_s`, in Unix seconds.
        """
        traces = self._traces
        step, links = f"step/{version}", []
        of_version: dict[str, str | int] = {"slipstream.version": version}
        for group_id, environment, task_index in groups:
            trace = f"group/{group_id}"
            links.append(trace)
            # An earlier controller has leased the groups of a run that was resumed.
            leased_s = self._leased.pop(group_id, begin_s)
            complete_s = max(self._complete.pop(group_id, begin_s), leased_s)
            of_group: dict[str, str | int] = {
                **of_version,
                "slipstream.group": group_id,
                "slipstream.environment": environment,
                "slipstream.task": task_index,
            }
            name = f"group {environment}"
            traces.span(trace, name, "", begin_s=leased_s, end_s=end_s, attributes=of_group)
            traces.span(trace, "lease", "lease", begin_s=leased_s, end_s=complete_s)
            traces.span(trace, "batch", "batch", begin_s=complete_s, end_s=max(begin_s, complete_s))
            traces.span(trace, "step", "step", begin_s=begin_s, end_s=end_s, links=[step])
        traces.span(
            step, "step", "", begin_s=begin_s, end_s=end_s, attributes=of_version, links=links
        )

    def published(
        self, publish_id: str, version: int, *, begin_s: float, num_bytes: int, error: str = ""
    ) -> None:
        """Sends the span of a publish that began at `begin_s`, in Unix seconds, and ends now.

        `error` is "" if the publish succeeded.
        """
        self._traces.span(
            f"publish/{publish_id}",
            "publish",
            "",
            begin_s=begin_s,
            attributes={"slipstream.version": version, "slipstream.bytes": num_bytes},
            error=error,
            links=[f"step/{version}"],
        )


def _keep(times: dict[GroupId, float], group_id: GroupId) -> None:
    times.setdefault(group_id, time.time())
    if len(times) > MAX_GROUPS:
        del times[next(iter(times))]
