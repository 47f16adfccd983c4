"""Writes the results of each step, of each evaluation and of the whole run, and a trace of a step.

The trace has Chrome's trace format, which ui.perfetto.dev opens. Times are Unix seconds by the
clock of the controller's machine.
"""

import asyncio
import heapq
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.core.run_folder import LEASE_WAITS, SERVER_SHARES, TRACE
from slipstream.learner.controller.events import Severity
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.scheduler import Books, Scheduler
from slipstream.learner.controller.part import OrderTimes, Part, Tasks
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.reporting.metrics import RunRecorder
from slipstream.learner.controller.reporting.trackers import write_result
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.learner.controller.trajectories.batches import BatchFormer, Trained
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.v1 import fleet_pb2, status_pb2, trainer_pb2

# Parts of training in their order.
_TRAINING = ("forward_s", "forward_backward_s", "optimizer_s")
# Largest number of episodes in a trace; browsers open larger traces slowly.
MOST_EPISODES = 4096
_COUNTED = ("busy_s", "paused_s", "uptime_s")


class StepTimes:
    """Computes the times of each step from counters, which grow from the controller's start.

    Call `report` for each report of a server, and `step` at the end of each step.
    """

    def __init__(self) -> None:
        self._reports: dict[object, fleet_pb2.ServerReport] = {}
        # Seconds of all servers since the last step, by the names in `_COUNTED`.
        self._work: Counter[str] = Counter()
        self._before: dict[str, float] = {}

    def report(self, key: object, report: fleet_pb2.ServerReport) -> None:
        """Adds the work of the server `key` since its previous report."""
        before = self._reports.get(key, fleet_pb2.ServerReport())
        for name in _COUNTED:
            self._work[name] += getattr(report, name) - getattr(before, name)
        self._reports[key] = report

    def lost(self, key: object) -> None:
        """Forgets a lost server."""
        self._reports.pop(key, None)

    def step(
        self,
        groups: Sequence[Group],
        orders: Sequence[OrderTimes],
        *,
        waited_s: float,
        lease_waits_s: Mapping[str, float],
    ) -> dict[str, float]:
        """Returns the times of the step that has just ended, by name.

        `waited_s` is the time in which the trainer waited for groups, and `lease_waits_s` the time
        in which a lease waited, by cause. Both are in seconds, in total since the controller
        started.
        """
        totals = {"groups_wait_s": waited_s} | {
            f"lease_wait_{name}_s": lease_waits_s[name] for name in LEASE_WAITS
        }
        passed = {name: total - self._before.get(name, 0.0) for name, total in totals.items()}
        self._before = totals
        work, self._work = self._work, Counter()
        given_s = orders[-1].given_s if orders else time.time()
        return {**passed, **_shares(work), **group_times(groups, given_s)}


def _shares(work: Mapping[str, float]) -> dict[str, float]:
    """Returns the shares of sampling, paused and idle time, or {} if no server has reported."""
    if (uptime_s := work.get("uptime_s", 0.0)) <= 0:
        return {}
    # A server may report a wrong time.
    sampling = min(1.0, max(0.0, work["busy_s"] / uptime_s))
    paused = min(1.0 - sampling, max(0.0, work["paused_s"] / uptime_s))
    values = (sampling, paused, 1.0 - sampling - paused)
    return dict(zip(SERVER_SHARES, values, strict=True))


def group_times(groups: Sequence[Group], given_s: float) -> dict[str, float]:
    """Returns the means of the groups' time in the queue and of their episodes' rest, in seconds.

    `given_s` is the Unix time at which the trainer got the groups. The rest of an episode is its
    time from lease to arrival outside engine and environment, or 0 if an earlier controller leased
    it.
    """
    waits = [max(0.0, given_s - max(g.back_s.values())) for g in groups if g.back_s]
    rests = [
        max(0.0, back_s - group.leased_s - each.generation_s - each.environment_s)
        if group.leased_s and (back_s := group.back_s.get(each.member)) is not None
        else 0.0
        for group in groups
        for each in group.in_order()
    ]
    return {
        **({"queue_s_mean": statistics.fmean(waits)} if waits else {}),
        **({"episode_rest_s_mean": statistics.fmean(rests)} if rests else {}),
    }


def trace(
    row: Mapping[str, float],
    groups: Sequence[Group],
    orders: Sequence[OrderTimes],
    *,
    training: tuple[float, float],
) -> dict[str, Any]:
    """Returns the step of `row` as a trace: one process for the trainer, one for each server.

    `training` is the start and end of training in Unix seconds. A server has one line for each
    episode that runs at the same time; an episode is a span from its lease to its arrival.
    """
    events = [*_trainer_events(row, orders, training)]
    number = 0
    servers: dict[str, int] = {}
    lanes: dict[str, list[tuple[float, int]]] = {}
    given_s = orders[-1].given_s if orders else training[0]
    for group in sorted(groups, key=lambda each: each.leased_s):
        for each in group.in_order():
            back_s = group.back_s.get(each.member)
            if back_s is None or not group.leased_s or number >= MOST_EPISODES:
                continue
            number += 1
            server = servers.setdefault(each.server_id, len(servers) + 2)
            free = lanes.setdefault(each.server_id, [])
            # Reuses a line that was free when the episode was leased.
            if free and free[0][0] <= group.leased_s:
                lane = heapq.heappop(free)[1]
            else:
                lane = len(free) + 1
            heapq.heappush(free, (back_s, lane))
            details = {
                "environment": each.environment,
                "task": each.task_index,
                "sampled_tokens": each.num_sampled_tokens,
                "engine_s": each.generation_s,
                "environment_s": each.environment_s,
                "versions": [span.version.step for span in each.version_spans],
                "complete_group_waited_s": max(0.0, given_s - max(group.back_s.values())),
            }
            name = f"{group.group_id}.{each.member}"
            events.append(_span(name, server, lane, (group.leased_s, back_s), details))
    names = {1: "trainer", **{place: f"server {name}" for name, place in servers.items()}}
    for place, name in names.items():
        label = {"ph": "M", "name": "process_name", "pid": place, "tid": 0, "ts": 0}
        events.append(label | {"args": {"name": name}})
    return {"traceEvents": events, "otherData": {"step": row["step"], "episodes": number}}


def _trainer_events(
    row: Mapping[str, float], orders: Sequence[OrderTimes], training: tuple[float, float]
) -> Iterator[dict[str, Any]]:
    # A controller that was started again while the trainer worked has given no order.
    for order, after in zip(orders, [*orders[1:], None], strict=False):
        yield _span(f"waits for: {order.kind}", 1, 1, (order.asked_s, order.given_s), {})
        if after is not None:
            yield _span(order.kind, 1, 1, (order.given_s, after.asked_s), {})
        else:
            yield _span("batch on its way", 1, 1, (order.given_s, training[0]), {})
    details = {
        name: value
        for name, value in row.items()
        if name.endswith(("_s", "_tokens")) and math.isfinite(value)
    }
    yield _span(f"training of step {row['step']:.0f}", 1, 1, training, details)
    at_s = training[0]
    for name in _TRAINING:
        if (took_s := row.get(name, 0.0)) > 0:
            yield _span(name.removesuffix("_s"), 1, 1, (at_s, at_s + took_s), {})
            at_s += took_s


def _span(
    name: str, process: int, line: int, times: tuple[float, float], details: Mapping[str, Any]
) -> dict[str, Any]:
    # Both ends are rounded, so that spans that touch do not overlap.
    start_us, end_us = (round(at_s * 1e6) for at_s in times)
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": line,
        "ts": start_us,
        "dur": max(0, end_us - start_us),
        "args": dict(details),
    }


# Time between two looks at the ledger, which counts all trajectories that wait.
LEDGER_S = 2.0


class Results(Part):
    """Gathers the numbers of a run from its parts, for its journal and its result files."""

    def __init__(
        self,
        run: Run,
        books: Books,
        recorder: RunRecorder,
        *,
        intake: Intake,
        former: BatchFormer,
        publisher: Publisher,
        scheduler: Scheduler,
    ) -> None:
        self._run, self._books, self._recorder = run, books, recorder
        self._intake, self._former = intake, former
        self._publisher, self._scheduler = publisher, scheduler
        self._folder, self._times = run.config.run_dir, StepTimes()
        # Done when the last evaluation is on disk; never done after a failure of the disk.
        self._evaluated: asyncio.Future[None] | None = None

    def restore(self, history: RunHistory) -> None:
        """Takes over the work of earlier servers."""
        self._recorder.rate.earlier = history.servers.generated

    def tasks(self) -> Tasks:
        """Returns the task that compares the counts of tokens."""
        return {"ledger": self._watch_ledger()}

    def reported(self, session: ServerSession, report: fleet_pb2.ServerReport) -> None:
        """Notes the work of a server since its previous report."""
        self._recorder.server_report(report)
        self._times.report(session.key, report)

    def lost(self, session: ServerSession) -> None:
        """Forgets a lost server."""
        self._times.lost(session.key)

    def stepped(
        self, trained: Trained, report: trainer_pb2.StepReport, orders: Sequence[OrderTimes]
    ) -> None:
        """Writes the row of a step, unless the step was repeated and already has its row."""
        books = self._books
        books.ledger.journal_servers()
        batch, now = trained.batch, time.time()
        training = (now - report.wall_s, now)
        if trained.again and self._recorder.has_row(batch.version):
            self._run.events.add(f"version {trained.version}, trained again")
            return
        snapshot = books.ledger.snapshot()
        row = self._recorder.step(
            batch,
            report.metrics,
            advantages=report.advantages,
            training=training,
            generated_tokens=snapshot.generated - snapshot.judged,
            gauges={
                "leased_groups": float(len(books.leases.training_groups())),
                "queued_tokens": float(snapshot.queued),
                "ledger_difference": float(snapshot.difference),
                "missing_members": float(
                    max(books.leases.group_size * len(batch.groups) - len(batch.trajectories), 0)
                ),
                "filtered_groups": float(books.state.filtered_groups[batch.step]),
                "set_aside_batches": float(len(books.state.set_aside)),
                "quarantined_trajectories": float(self._intake.inspector.quarantine.total),
                **books.environments.gauges(),
                **self._publisher.totals.gauges(),
                **books.fleet.gauges(),
                "reserved_bytes": float(self._scheduler.reserved_bytes),
                **self._times.step(
                    batch.groups,
                    orders,
                    waited_s=self._former.waits.total_s(time.monotonic()),
                    lease_waits_s=self._scheduler.waited_s(),
                ),
            },
        )
        if batch.step % self._run.config.controller.sample_every_steps == 0:
            steps = trace(row, batch.groups, orders, training=training)
            write_result(self._folder / TRACE, json.dumps(steps).encode(), self._run.events.warn)
        overflows, scale = int(row.get("gradient_overflows", 0)), row.get("loss_scale")
        if overflows:
            self._run.events.add(
                f"step {batch.version}: gradients left the range of float16 {overflows} times and "
                f"were computed again; the scale of the loss is {scale:g} now"
            )
        self._run.events.add(
            f"version {report.version.step}", step=report.version.step, metrics=row
        )

    async def _watch_ledger(self) -> None:
        """Adds an error event for each hand-over of trajectories whose two counts begin to differ.

        Runs until the task is cancelled.
        """
        while True:
            await asyncio.sleep(LEDGER_S)
            self._tell_gaps()

    def _tell_gaps(self) -> None:
        for line in self._books.ledger.news():
            self._run.events.add(f"the ledger is open, {line}", Severity.ERROR)

    def evaluated(self, result: kinds.Evaluation) -> None:
        """Writes the result of an evaluation round."""
        journal = self._books.journal
        journal.append(result)
        # While the trainer writes its last model, no other record would take this one to the disk.
        self._evaluated = journal.durable()
        self._recorder.evaluation(result)

    def is_done(self) -> bool:
        """Whether each result that was passed to `evaluated` is written to disk."""
        return self._evaluated is None or self._evaluated.done()

    async def write(self, goodbye: trainer_pb2.TrainerGoodbye | None) -> None:
        """Marks the run as ended, writes its summary, and closes its event log.

        `goodbye` is the trainer's message, or None if it did not come.
        """
        progress, books = self._run.progress, self._books
        self._tell_gaps()
        progress.end()
        state = status_pb2.RunState.Name(progress.state)
        self._recorder.summary(
            ledger=books.ledger.snapshot(),
            state=books.state,
            publish=self._publisher.totals.summary(),
            weight_digest=goodbye.weight_digest.hex() if goodbye is not None else "",
            ending={
                "state": state.removeprefix("RUN_STATE_").lower(),
                "cause": progress.cause,
                "suspended_environments": {**books.environments.suspended()},
                "environments": self._intake.feed.summary(),
            },
        )
        await asyncio.to_thread(self._recorder.close)
        self._run.events.close(progress.state, progress.cause)
