"""The controller's spans: the way of each group from its lease to its step, and each publish.

A rollout server adds its own to the same traces: episodes, calls, deliveries, loads of weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from slipstream.core.types import GroupId, Purpose, Trajectory

if TYPE_CHECKING:
    from slipstream.protocol.traces import Traces

# Groups whose times are kept; those that are never trained make room.
MAX_GROUPS = 65_536


class RunTraces:
    """Notes when groups come by, and sends their spans with the step that trains them.

    Without `traces`, which an application sets before the first lease, all methods do nothing.
    """

    def __init__(self) -> None:
        self.traces: Traces | None = None
        # Unix times of the first lease and of the completion.
        self._leased: dict[GroupId, float] = {}
        self._complete: dict[GroupId, float] = {}

    def leased(self, group_id: GroupId) -> None:
        """Notes a lease."""
        if self.traces is not None:
            _keep(self._leased, group_id)

    def arrived(self, trajectory: Trajectory) -> None:
        """Sends the moment in which a trajectory was filed."""
        if self.traces is None or trajectory.purpose is not Purpose.TRAINING:
            return
        attempt = f"{trajectory.member}.{trajectory.attempt}"
        now_s = time.time()
        self.traces.span(
            f"group/{trajectory.group_id}",
            "arrival",
            f"arrival/{attempt}.{trajectory.server_epoch:x}",
            parent=f"episode/{attempt}",
            begin_s=now_s,
            end_s=now_s,
        )

    def completed(self, group_id: GroupId) -> None:
        """Notes that a group waits for its batch from now on."""
        if self.traces is not None:
            _keep(self._complete, group_id)

    def stepped(
        self,
        version: int,
        groups: Iterable[tuple[GroupId, str, int]],
        *,
        begin_s: float,
        end_s: float,
    ) -> None:
        """Sends the spans of a step and of its groups (id, environment, number of the task)."""
        traces = self.traces
        if traces is None:
            return
        step, links = f"step/{version}", []
        for group_id, environment, task_index in groups:
            trace = f"group/{group_id}"
            links.append(trace)
            # An earlier controller has leased the groups of a run that was resumed.
            leased_s = self._leased.pop(group_id, begin_s)
            complete_s = max(self._complete.pop(group_id, begin_s), leased_s)
            traces.span(
                trace,
                f"group {environment}",
                "",
                begin_s=leased_s,
                end_s=end_s,
                attributes={
                    "slipstream.group": group_id,
                    "slipstream.environment": environment,
                    "slipstream.task": task_index,
                    "slipstream.version": version,
                },
            )
            traces.span(trace, "lease", "lease", begin_s=leased_s, end_s=complete_s)
            traces.span(trace, "batch", "batch", begin_s=complete_s, end_s=max(begin_s, complete_s))
            traces.span(trace, "step", "step", begin_s=begin_s, end_s=end_s, links=[step])
        traces.span(
            step,
            "step",
            "",
            begin_s=begin_s,
            end_s=end_s,
            attributes={"slipstream.version": version},
            links=links,
        )

    def published(
        self, publish_id: str, version: int, *, begin_s: float, num_bytes: int, error: str = ""
    ) -> None:
        """Sends the span of a publish, from its order to the last server in time."""
        if self.traces is not None:
            self.traces.span(
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
