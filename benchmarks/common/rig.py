"""A run whose controller lives in the benchmark's process, where it can be steered and timed.

Trainer ranks and rollout servers are the product's own programs, started as `slipstream run` starts
them; the controller is the product's too, and its publisher's calls are timed. Consumes: a
configuration and a placement. Waits for: the fleet, a publish, a step. Unblocked by: these, the end
of a process, or a limit.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from google.protobuf.message import Message
from slipstream.client.launch.children import Child, rank_environments, start_child
from slipstream.client.launch.placement import SERVER, TRAINER
from slipstream.client.run_folder import identified, write_config
from slipstream.core.errors import RunFailed
from slipstream.core.run_folder import METRICS
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller import application
from slipstream.learner.controller.application import Controller
from slipstream.learner.controller.loop import BatchFormer
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.reporting.trackers import read_rows
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.learner.controller.trajectories.formed_batch import FormedBatch, StepOrder
from slipstream.protocol.access.security import Credentials
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2

from benchmarks.common.measure import ROOT, visible

GRACE_S = 15.0
OPEN = Credentials()


@dataclass(frozen=True)
class Placement:
    """The GPUs, or processor cores on a CPU, of the trainer ranks and of each rollout server."""

    learner: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]
    device: str = "cuda"


@dataclass
class PublishTimes:
    """The moments of one publish at the controller, in seconds of the monotonic clock."""

    publish_id: str
    # The version that is sent.
    step: int
    # The trainer was given the order, after every server had said that it is ready.
    ordered: float
    # The trainer could send, and the servers were told to receive.
    started: float = 0.0
    # `sent`: the trainer has sent everything. `finished`: it was told that all servers have loaded.
    sent: float = 0.0
    finished: float = 0.0
    # Times by server: when it reported that it has loaded, reported that it serves, began to serve.
    loaded: dict[str, float] = field(default_factory=dict)
    serving: dict[str, float] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    # Times that the trainer and the servers measured themselves, by the names of the protocol.
    trainer: dict[str, float] = field(default_factory=dict)
    servers: dict[str, dict[str, float]] = field(default_factory=dict)
    # The trainer's probe with its own answer, and the answer of each server.
    probe: weights_pb2.Probe | None = None
    answers: dict[str, bytes] = field(default_factory=dict)
    error: str = ""

    def row(self) -> dict[str, Any]:
        """Returns the record for the result: seconds from the order, and all other fields."""
        start = self.ordered
        return {
            "publish": self.publish_id,
            "started_s": self.started - start,
            "sent_s": self.sent - start,
            "loaded_s": max(self.loaded.values(), default=start) - start,
            "serving_s": max(self.serving.values(), default=start) - start,
            "served_s": max(self.served.values(), default=start) - start,
            "finished_s": self.finished - start,
            "paused_s": max((s.get("paused_s", 0.0) for s in self.servers.values()), default=0.0),
            "trainer": self.trainer,
            "servers": self.servers,
            "error": self.error,
        }


class TimedPublisher(Publisher):
    """The real publisher; `publishes` grows with the moments of each publish."""

    def __init__(self, fleet: Fleet, run: ControlledRun, tasks: asyncio.TaskGroup) -> None:
        super().__init__(fleet, run, tasks)
        self.publishes: list[PublishTimes] = []
        # Called when the servers are about to be told to receive.
        self.on_start: Callable[[], None] | None = None

    async def prepare(
        self, trainer: trainer_pb2.NextRequest | None = None
    ) -> weights_pb2.PublishOrder | None:
        """Notes when an order is ready; it may begin the publish."""
        order = await super().prepare(trainer)
        if order is not None:
            step = int(order.version.step)
            self.publishes.append(PublishTimes(order.publish_id, step, time.monotonic()))
            if order.begun:
                self._started()
        return order

    def start(self, start: trainer_pb2.PublishStart) -> list[weights_pb2.Receiver]:
        """Notes when the trainer can send."""
        self._started()
        return super().start(start)

    def _started(self) -> None:
        self.publishes[-1].started = time.monotonic()
        if self.on_start is not None:
            self.on_start()

    async def finish(self, result: trainer_pb2.PublishResult) -> trainer_pb2.PublishReceipt:
        """Notes when the trainer has sent all, and when it is told that all have loaded."""
        times = self.publishes[-1]
        times.sent = time.monotonic()
        times.error = result.error
        times.trainer = numbers(result)
        times.probe = result.probe if result.HasField("probe") else None
        receipt = await super().finish(result)
        times.finished = time.monotonic()
        return receipt

    def publish_reported(self, session: ServerSession, message: fleet_pb2.PublishReport) -> None:
        """Notes when a server has loaded, and when it serves."""
        times = next((t for t in self.publishes if t.publish_id == message.publish_id), None)
        phases = (fleet_pb2.PUBLISH_PHASE_LOADED, fleet_pb2.PUBLISH_PHASE_SERVING)
        if times is not None and message.phase in phases:
            now = time.monotonic()
            # A server that serves has loaded: one report may say both.
            times.loaded.setdefault(session.name, now)
            if message.phase == fleet_pb2.PUBLISH_PHASE_SERVING:
                times.serving[session.name] = now
                # All processes run on this host, so their clocks are the same.
                times.served[session.name] = message.stages.served_at
            times.servers.setdefault(session.name, {}).update(numbers(message))
            if message.probe_logprobs:
                times.answers[session.name] = message.probe_logprobs
        super().publish_reported(session, message)


class HeldFormer(BatchFormer):
    """The real former of batches; `hold` keeps batches from the trainer."""

    hold = False
    # Steps, counted from 0, whose batches reach the trainer without the experts of their tokens.
    without_experts: frozenset[int] = frozenset()
    # Whether the trainer has asked for a batch and has none yet.
    batch_waits = False

    async def form(self, given: StepOrder | None = None) -> FormedBatch | None:
        """Gives the trainer no batch while it is held."""
        batch = None if self.hold else await super().form(given)
        self.batch_waits = batch is None
        return batch

    async def _write(self, batch: FormedBatch) -> FormedBatch | RunFailed:
        if batch.step in self.without_experts:
            for group in batch.groups:
                for member, trajectory in group.finished.items():
                    group.finished[member] = replace(trajectory, routed_experts=None)
        return await super()._write(batch)


class SteeredController(Controller):
    """The real controller, whose publishes are timed and whose batches can be held."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, OPEN)
        self.ready = asyncio.Event()

    def _make_parts(self, tasks: asyncio.TaskGroup) -> None:
        steered = {"Publisher": TimedPublisher, "BatchFormer": HeldFormer}
        with patch.multiple(application, **steered):
            super()._make_parts(tasks)
        self.ready.set()

    @property
    def publishes(self) -> list[PublishTimes]:
        return self.publisher.publishes

    @property
    def rows(self) -> list[dict[str, float]]:
        rows = read_rows(self._config.run_dir / METRICS)
        return [row for row in rows if "step" in row]

    @property
    def publish_totals(self) -> dict[str, float]:
        """Figures of all publishes, as in the summary of the run."""
        return self.publisher.totals.summary()

    @property
    def sessions(self) -> list[ServerSession]:
        return list(self._fleet.sessions.values())

    @property
    def events(self) -> list[str]:
        """Texts of all events of the run so far."""
        return [event.text for event in self._run.events.kept()]

    def generated_tokens(self) -> int:
        """Returns the tokens that the engines had counted at the newest heartbeats."""
        return int(self.books.ledger.snapshot().generated)

    def complete_groups(self) -> int:
        """Returns the number of complete groups, which wait for a batch."""
        return sum(group.is_complete for group in self._book.training_groups())

    def open_episodes(self) -> int:
        """Returns the number of episodes that servers have and that are not back."""
        episodes = self._book.episodes_by_holder()
        return sum(episodes[session.key] for session in self.sessions)

    def is_held_up(self) -> bool:
        """Whether the trainer waits for groups that are due in its next step."""
        return self.former.batch_waits and self._book.has_whole_batch and bool(self._book.due())

    def group_ids(self) -> set[str]:
        """Returns the ids of the groups that are leased and not trained."""
        return {group.group_id for group in self._book.training_groups()}

    def bound(self, max_staleness: int) -> None:
        """Sets the bound of later leases, which is at most the configured one."""
        self._book.max_staleness = max_staleness
        self._run.signal.notify()

    def send_again(self) -> None:
        """Makes every serving server take the newest weights once more."""
        version = self._progress.version
        for session in self._fleet.serving():
            # Weights of another incarnation are not the learner's, whatever their step.
            session.version = PolicyVersion(version.incarnation + 1, version.step)
            session.changed()
        self._run.signal.notify()

    def all_serve(self, count: int) -> bool:
        """Whether at least `count` servers serve the newest version."""
        version = self._progress.version
        return sum(session.version == version for session in self._fleet.serving()) >= count

    async def moved(self, limit_s: float) -> None:
        """Waits until the state of the run changes, at most `limit_s`."""
        await self._run.signal.changes(limit_s, gather_s=0.0)


class Rig:
    """The processes of one run, from the first to the last; an async context manager."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        *,
        environ: Mapping[str, str] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """`environ`: variables of all processes beside those of their placement.

        `grace_s`: seconds that all have to end by themselves, which includes a final export.
        """
        self._grace_s = grace_s
        self.config = config = identified(
            config, config.controller.address, config.run.id or config.run.name
        )
        self._placement = placement
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._environ = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **(environ or {})}
        self.controller = SteeredController(config)
        self.trainers: list[Child] = []
        self.servers: list[Child] = []

    async def __aenter__(self) -> Rig:
        self._path = write_config(self.config, self.config.run_dir)
        self._running = asyncio.create_task(self.controller.run())
        ready = asyncio.create_task(self.controller.ready.wait())
        await asyncio.wait((ready, self._running), return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            ready.cancel()
            self._running.result()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.controller.former.hold = False
        self.controller.stop("the benchmark is over")
        children = [*self.trainers, *self.servers]
        ends = asyncio.gather(*(child.process.wait() for child in children))
        await asyncio.wait((ends, self._running), timeout=self._grace_s)
        await asyncio.gather(*(child.stop(1.0) for child in children))
        ends.cancel()
        if not self._running.done():
            # The controller waits for the goodbye of a trainer that is gone.
            self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def start_trainers(self) -> None:
        """Starts all trainer ranks on the GPUs of the learner."""
        for environ in rank_environments(self.config, range(self.config.learner.world_size)):
            name = f"trainer-rank-{environ['RANK']}"
            child = await self._start(name, TRAINER.module, [], self._placement.learner, environ)
            self.trainers.append(child)

    async def start_server(self, index: int) -> Child:
        name = f"server-{index}"
        arguments = ["--controller", self.config.controller.address, "--server-id", name]
        child = await self._start(
            name, SERVER.module, arguments, self._placement.servers[index], {}
        )
        self.servers.append(child)
        return child

    async def until(self, reached: Callable[[], bool], what: str, limit_s: float) -> float:
        """Returns the seconds until `reached`; RuntimeError if a process or the time ends first."""
        started = time.monotonic()
        while not reached():
            if self._running.done():
                self._running.result()
                raise RuntimeError(f"the run is over: {self.controller.events[-3:]}")
            for child in (*self.trainers, *self.servers):
                if not child.is_running and child.process.returncode:
                    raise RuntimeError(f"while waiting for {what}: {child.describe_end()}")
            if time.monotonic() - started > limit_s:
                raise RuntimeError(
                    f"{what}: not within {limit_s:g} s; {self.controller.events[-3:]}"
                )
            await self.controller.moved(0.05)
        return time.monotonic() - started

    async def until_serving(self, limit_s: float) -> float:
        """Returns the seconds until all started servers serve the newest version."""
        count = len(self.servers)
        return await self.until(
            lambda: self.controller.all_serve(count), f"{count} servers", limit_s
        )

    async def publish(self, limit_s: float = 120.0) -> PublishTimes:
        """Sends the weights to all servers once more; RuntimeError when that fails."""
        before = len(self.controller.publishes)
        self.controller.send_again()
        await self.until_serving(limit_s)
        times = self.controller.publishes[-1]
        # The servers may serve before the trainer says that it has sent all.
        await self.until(lambda: bool(times.finished), "the trainer", limit_s)
        tries = len(self.controller.publishes) - before
        if tries != 1 or times.error:
            raise RuntimeError(f"{tries} publishes, {times.error}; {self.controller.events[-3:]}")
        return times

    async def _start(
        self,
        name: str,
        module: str,
        arguments: list[str],
        places: tuple[int, ...],
        environ: Mapping[str, str],
    ) -> Child:
        settings = {**self._environ, **environ}
        if self._placement.device == "cuda":
            settings["CUDA_VISIBLE_DEVICES"] = visible(places)
        child = await start_child(
            name,
            module,
            ["--config", str(self._path), *arguments],
            log_path=self.config.run_dir / "logs" / f"{name}.log",
            environ=settings,
        )
        if self._placement.device == "cpu" and places:
            os.sched_setaffinity(child.process.pid, places)
        return child


def numbers(message: Message) -> dict[str, float]:
    """Returns the numbers of a message by name, with those of the messages in it."""
    values: dict[str, float] = {}
    for descriptor, value in message.ListFields():
        if isinstance(value, int | float):
            values[descriptor.name] = float(value)
        elif isinstance(value, Message):
            values |= numbers(value)
    return values
