"""One simulated run: its processes, the faults of a seed, and the start of what has ended."""

import asyncio
import contextlib
import functools
import gc
import hashlib
import itertools
import logging
import math
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

from slipstream.client import client
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import RunFailed
from slipstream.core.settings.config import Config
from slipstream.core.types import ServerId, Trajectory, TrajectoryId
from slipstream.extensions.redis import queue as redis
from slipstream.extensions.redis import receiver as redis_receiver
from slipstream.learner.controller import application
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.leasing.shares import BatchChoice
from slipstream.learner.controller.records import snapshots
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import ServerKey, ServerSession
from slipstream.learner.controller.services import fleet_service
from slipstream.learner.trainer import controller_client
from slipstream.learner.trainer.ranks import activity
from slipstream.protocol.access.checked_calls import Refusals
from slipstream.protocol.access.security import Credentials
from slipstream.protocol.codec import encode_trajectory
from slipstream.protocol.queue import grpc
from slipstream.rollout_server import service, session
from slipstream.rollout_server.episodes import dispatcher, environments
from slipstream.rollout_server.episodes.play import ServedModel
from slipstream.rollout_server.usage import EpochCounters
from slipstream.rollout_server.vllm.agent_services import AgentServices
from slipstream.v1 import fleet_pb2, status_pb2, trainer_pb2, trajectory_pb2
from support.references.plain_shares import MixedGroup, Moment, share_faults

from simulation.blocking import THREADING, BlockingChannel, run_blocking, sleep
from simulation.disk import Disk, OwnedJournal, close_files
from simulation.durable_queue import DurableQueue
from simulation.finished_episodes import FinishedEpisodes
from simulation.fleet import (
    NUM_TASKS,
    NumberRenderer,
    SecondEnvironment,
    SimulatedEngine,
    SimulatedGateway,
    SimulatedWorker,
    Tokens,
    Wire,
)
from simulation.network import Network, SimulatedChannel, SimulatedServer
from simulation.served import Habits, ServedEnvironment, answer_often, serve
from simulation.storage import URL, Store
from simulation.trainer import SimulatedTrainer, Truth
from simulation.virtual_loop import (
    PROCESS,
    START_S,
    Process,
    RunStuck,
    VirtualLoop,
    virtual_time,
)

ADDRESS = "127.0.0.1:7070"
OPEN = Credentials()
# Virtual seconds in which a client may be refused because of one before; a partition lasts 10.
REFUSED_S = 15.0
# Virtual seconds that a step takes without faults, about.
STEP_S = 2.5
# Seeds from here on are runs of many crashes.
CRASHES = 10**6
# Runs between two collections of garbage.
RUNS_KEPT = 10
# Virtual seconds that a run may take once its faults are over.
LIMIT_S = 240.0


@dataclass(frozen=True)
class Shape:
    """The settings that a seed chooses."""

    steps: int
    groups_per_step: int
    max_staleness: int
    servers: int
    checkpoint_every: int
    verify_every: int
    noise: bool
    filters: bool
    # Whether trajectories lie in a queue of its own, instead of with their servers.
    has_queue: bool
    # Every how many steps an evaluation is due; None without evaluations.
    evaluate_every: int | None
    max_turns: int
    # Whether a client serves one more environment.
    has_client: bool
    # Whether the servers take their weights from storage.
    is_by_storage: bool = False
    # Whether no lease is taken back for its time: a lie must be found out at once.
    has_patience: bool = False
    # Whether batches go that no resume needs.
    removes: bool = False
    # Whether the tasks of environment "e" are drawn by weights.
    is_weighed: bool = False
    # The second environment, "f", and its weight beside the 1 of "e"; None without it.
    second: SecondEnvironment | None = None
    second_weight: float = 1.0


@dataclass(frozen=True)
class Fault:
    """One planned fault; `name` is that of a method of `World`."""

    at_s: float
    name: str


@dataclass
class Result:
    """What a schedule showed."""

    seed: int
    violations: list[str]
    digest: str
    fired: Counter[str]
    virtual_s: float
    # Steps, trajectories, tokens and mixed batches.
    trained: Counter[str]


_real_version = metadata.version


@functools.cache
def _found_version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return _real_version(name)
    return None


def _package_version(name: str) -> str:
    found_version = _found_version(name)
    if found_version is None:
        raise metadata.PackageNotFoundError(name)
    return found_version


def environments_of(shape: Shape) -> list[dict[str, Any]]:
    environments: list[dict[str, Any]] = [{"name": "e", "reference": "m:E"}]
    if shape.second is not None:
        second = {"name": "f", "reference": "m:F", "weight": shape.second_weight}
        environments.append(second)
    return environments


def config_of(shape: Shape, folder: Path) -> Config:
    table = {
        "run": {"name": "sim", "steps": shape.steps, "dir": str(folder)},
        "model": {"path": "nowhere"},
        "algorithm": {
            "group_size": 2,
            "groups_per_step": shape.groups_per_step,
            "max_staleness": shape.max_staleness,
            "learning_rate": 1e-3,
            "filter": "unequal_rewards" if shape.filters else "none",
        },
        "sampling": {
            "max_reply_tokens": 4,
            "max_episode_tokens": 64,
            "max_turns": shape.max_turns,
        },
        "controller": {
            "address": ADDRESS,
            "heartbeat_timeout_s": 4.0,
            "lease_timeout_s": 1000.0 if shape.has_patience else 30.0,
            "max_set_aside_batches": 100,
        },
        "rollout_server": {"max_episodes": 8, "drain_timeout_s": 2.0},
        "weights": {
            "verify_every": shape.verify_every,
            "join_deadline_s": 5.0,
            "bucket_deadline_s": 2.0,
        },
        "environments": environments_of(shape),
        # A tracker would be a thread on the real clock.
        "tracking": {"trackers": []},
    }
    if shape.removes:
        table["checkpoint"] = {"keep_last": 1, "keep_batches": False}
    if shape.is_weighed:
        weighed = {"e": {"function": "simulation.samplers:least_drawn"}}
        table["extensions"] = {"task_weights": {"environments": weighed}}
    if shape.is_by_storage:
        table["weights"] |= {"storage_url": URL, "storage_deadline_s": 6.0}
    if shape.has_queue:
        table["queue"] = {"kind": "redis", "redis_url": "redis://127.0.0.1:6379"}
    if shape.evaluate_every is not None:
        played = {"name": "v", "reference": "m:V", "every_steps": shape.evaluate_every}
        table["evaluations"] = [{**played, "num_episodes": NUM_TASKS}]
    return parse_config(table, source="simulation")


def plan(seed: int) -> tuple[Shape, list[Fault]]:
    """The settings and faults of a seed."""
    shape, faults = many_crashes(seed) if seed >= CRASHES else some_faults(seed)
    return replace(shape, removes=bool(shape.checkpoint_every and seed % 2)), faults


def many_crashes(seed: int) -> tuple[Shape, list[Fault]]:
    """Settings of a run whose controller ends again and again, often in the middle of a write."""
    rnd = random.Random(f"crashes/{seed}")
    shape, _ = some_faults(seed)
    shape = replace(
        shape,
        steps=rnd.choice((2, 3, 4)),
        groups_per_step=rnd.randint(1, 3),
        noise=rnd.random() < 0.7,
        filters=rnd.random() < 0.5 or shape.second is SecondEnvironment.FILTERED,
        has_client=rnd.random() < 0.6,
    )
    names = (
        *("kill_at_sync", "power_failure", "kill_controller") * 3,
        "kill_client",
        "bad_client",
        "kill_server",
        "kill_trainer",
        "second_trainer",
        "failing_environment",
        "slow_queue",
        "lost_connections",
        "slow_disk",
    )
    faults = [
        Fault(rnd.uniform(0.1, 1.0 + STEP_S * shape.steps), rnd.choice(names))
        for _ in range(rnd.choice((6, 9, 12)))
    ]
    return shape, sorted(faults, key=lambda fault: fault.at_s)


def some_faults(seed: int) -> tuple[Shape, list[Fault]]:
    rnd = random.Random(f"plan/{seed}")
    shape = Shape(
        steps=rnd.choice((1, 2, 2, 3, 4)),
        groups_per_step=rnd.randint(1, 2),
        max_staleness=rnd.randint(0, 2),
        servers=rnd.randint(1, 3),
        checkpoint_every=rnd.choice((0, 1, 2)),
        verify_every=rnd.choice((1, 2, 10)),
        noise=rnd.random() < 0.4,
        filters=rnd.random() < 0.3,
        has_queue=rnd.random() < 0.4,
        evaluate_every=rnd.choice((None, None, 0, 1, 2)),
        max_turns=rnd.choice((1, 1, 3)),
        has_client=rnd.random() < 0.2,
    )
    names = [
        name.removeprefix("fault_") for name in dir(World) if name.startswith("fault_")
    ]
    names = [name for name in names if not name.endswith(("_storage", "_lie"))]
    faults = [
        Fault(rnd.uniform(0.1, 1.0 + STEP_S * shape.steps), rnd.choice(names))
        for _ in range(rnd.choice((0, 2, 3, 3, 4, 6)))
    ]
    # Drawn apart, so that the other runs stay as they are.
    rnd = random.Random(f"plan of storage/{seed}")
    if rnd.random() < 0.3:
        shape = replace(shape, is_by_storage=True)
        kinds = (
            "failing_storage",
            "torn_storage",
            "late_storage",
            "slow_storage",
            "full_storage",
        )
        faults += [
            Fault(rnd.uniform(0.0, STEP_S * shape.steps), rnd.choice(kinds))
            for _ in range(rnd.choice((0, 1, 2, 3)))
        ]
    rnd = random.Random(f"plan of the lies/{seed}")
    if rnd.random() < 0.1:
        lie = rnd.choice(("foreign_run_lie", "lost_delivery_lie", "kept_lease_lie"))
        faults.append(Fault(rnd.uniform(0.0, STEP_S * shape.steps), lie))
        shape = replace(shape, has_patience=lie == "foreign_run_lie")
    is_weighed = random.Random(f"plan of the weights/{seed}").random() < 0.4
    shape = replace(shape, is_weighed=is_weighed)
    rnd = random.Random(f"plan of the mixture/{seed}")
    if rnd.random() < 0.4:
        second = rnd.choice(list(SecondEnvironment))
        shape = replace(
            shape,
            groups_per_step=rnd.randint(1, 4),
            second=second,
            second_weight=rnd.choice((0.25, 1.0, 1.0, 3.0)),
            filters=shape.filters or second is SecondEnvironment.FILTERED,
        )
    return shape, sorted(faults, key=lambda fault: fault.at_s)


class World:
    """The processes of one run, and what starts them again; `run` it once."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        *,
        planned: tuple[Shape, list[Fault]] | None = None,
        verbose: bool = False,
    ) -> None:
        self.seed = seed
        self._folder = folder
        self.shape, self.faults = planned if planned is not None else plan(seed)
        self.config = config_of(self.shape, folder)
        self.loop = VirtualLoop(seed)
        self.random = random.Random(f"world/{seed}")
        self._trace = hashlib.blake2b(digest_size=16)
        self._verbose = verbose
        self.network = Network(self.loop, seed, self.trace)
        self.network.on_arrival = self._arrived
        self.network.on_error = self._handler_failed
        self.disk = Disk(self.config.run_dir / "journal", seed)
        self.disk.kill = self._killed_at_sync
        self.wire, self.tokens, self.truth = Wire(), Tokens(), Truth()
        self.queue, self.store = DurableQueue(self), Store(self)
        # The newest process of each name, and all that were ever started.
        self.processes: dict[str, Process] = {}
        self._started: list[Process] = []
        self.engines: list[SimulatedEngine] = []
        self.gateways: list[SimulatedGateway] = []
        # Signals that tell a server to leave, by the name of its process.
        self.stops: dict[str, asyncio.Event] = {}
        self.habits = Habits()
        self.finished_episodes = FinishedEpisodes(self)
        # Number of trajectories that each server still spoils, by the lie and its process.
        self.lies: Counter[tuple[str, Process]] = Counter()
        self.violations: list[str] = []
        # Number of batches with groups of several environments, of runs with a second one.
        self.mixed_batches = 0
        # The state that the last controller knew at its end; None if none came to an end.
        self.state: RunState | None = None
        self.fired: Counter[str] = Counter()
        self.causes: list[str] = []
        self._numbers = 0
        # How much of the journal was synced when a server got an acknowledgement, by id.
        self.acknowledged: dict[str, tuple[int, int]] = {}
        # The same when a server got a lease of a group, by both.
        self.leased: dict[tuple[str, str], tuple[int, int]] = {}
        self._images: dict[Process, dict[Path, bytes]] = {}
        self._finished = self.loop.create_future()
        self.controller: application.Controller | None = None
        # The one that was started last, and all by the names of their processes.
        self.trainer: SimulatedTrainer | None = None
        self.trainers: dict[str, SimulatedTrainer] = {}

    def trace(self, line: str) -> None:
        self._trace.update(line.encode())
        if self._verbose:
            print(line)

    def note(self, line: str) -> None:
        self.trace(f"{self.loop.now_s:.6f} {line}")

    # Processes.

    def spawn(self, name: str) -> Process:
        process = Process(self.loop, name)
        self._started.append(process)
        self.processes[name.partition("/")[0]] = process
        self.note(f"start {name}")
        return process

    def is_alive(self, name: str) -> bool:
        process = self.processes.get(name.partition("/")[0])
        return process is not None and process.name == name and process.is_alive

    async def _life(self, process: Process, main: Any) -> Any:
        """Returns what the process's main coroutine returns; None if it was killed."""
        ended = self.loop.create_future()

        def end(*_: Any) -> None:
            if not ended.done():
                ended.set_result(None)

        task = process.start(main)
        task.add_done_callback(end)
        process.at_end.append(end)
        await ended
        result = None
        error = None
        if process.is_alive and task.done() and not task.cancelled():
            error = task.exception()
            result = task.result() if error is None else None
        process.die()
        self._bury(process)
        if error is not None:
            raise error
        return result

    def kill(
        self, name: str, *, half_open_s: float = 0.0, power_fails: bool = False
    ) -> bool:
        """Kills the process of this name, at this moment; False if there is none."""
        process = self.processes.get(name)
        if process is None or not process.is_alive:
            return False
        self.note(f"kill {process.name}")
        if name == "controller":
            self._images[process] = self.disk.image(power_fails=power_fails)
        process.die()
        self.network.reset(process, half_open_s=half_open_s)
        return True

    def _killed_at_sync(self) -> None:
        self.fired["kill at sync"] += 1
        self.loop.thread_s = 0.004
        self.kill("controller", power_fails=True)

    def _bury(self, process: Process) -> None:
        self.network.reset(process)
        process.bury()
        close_files(process)
        image = self._images.pop(process, None)
        if image is not None:
            self.disk.restore(image)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # The three kinds of processes, each started again until the run has finished.

    async def _keep_controller(self) -> None:
        for _ in range(20):
            process = self.spawn("controller")
            self.finished_episodes.began_s = self.loop.now_s
            controller = self.controller = process.run(
                functools.partial(application.Controller, self.config, OPEN)
            )
            try:
                code = await self._life(process, controller.run())
            except Exception as error:  # noqa: BLE001 - what a process ends with
                self._controller_failed(f"{type(error).__name__}: {error}")
                code = None
            if code == 0:
                self.state = controller.books.state
                self._finished.set_result(None)
                return
            if code == 1:
                self._controller_failed(controller._progress.cause)
            await asyncio.sleep(self.random.uniform(0.2, 2.0))
        self.violations.append("the controller was started 20 times")
        self._finished.set_result(None)

    def _controller_failed(self, cause: str) -> None:
        self.note(f"the run failed: {cause}")
        # A trainer that is told to leave by SIGTERM may fail; a failed controller tells it too.
        is_told = self.fired["terminated trainer"] > 0
        may_leave = cause.startswith("the trainer left") and (
            is_told or bool(self.causes)
        )
        may_leave |= cause.startswith("trainer rank 0: RunFailed") and is_told
        self.causes.append(cause)
        if "cannot be written: No space left" not in cause and not may_leave:
            self.violations.append(f"the run failed: {cause}")

    async def _keep_server(self, index: int) -> None:
        name = f"server{index}"
        while not self._finished.done():
            process = self.spawn(f"{name}/{self._number()}")
            try:
                await self._life(process, self._server(process, ServerId(name)))
            except Exception as error:  # noqa: BLE001 - what a process ends with
                if not self._is_over():
                    self._unexpected(process, error)
            await asyncio.sleep(self.random.uniform(0.2, 2.0))

    async def _server(self, process: Process, name: ServerId) -> None:
        seed = f"{self.seed}/{process.name}"
        engine = SimulatedEngine(process, self.loop, self.wire, self.tokens, seed)
        engine.violations = self.violations
        engine.truth = self.truth
        gateway = SimulatedGateway(
            self.loop, seed, self._folder / "logs", self.shape.second
        )
        self.engines.append(engine)
        self.gateways.append(gateway)
        renderer = NumberRenderer()
        server = service.RolloutServer(
            self.config,
            ADDRESS,
            name,
            ServedModel(
                engine,
                renderer,
                AgentServices(None, renderer, self.config.rollout_server),
            ),
            gateway,
        )
        stop = self.stops[process.name] = asyncio.Event()
        await server.run(stop)

    async def _keep_client(self) -> None:
        refused_s = math.inf
        while not self._finished.done():
            process = self.spawn(f"client/{self._number()}")
            environment = ServedEnvironment(self.habits, f"{self.seed}/{process.name}")
            try:
                await self._life(process, serve(ADDRESS, environment))
                refused_s = math.inf
            except Exception as error:  # noqa: BLE001 - what a process ends with
                # The controller may not know yet that the client before is gone.
                refused_s = min(refused_s, self.loop.now_s)
                is_early = self.loop.now_s < refused_s + REFUSED_S
                if not self._is_over() and not (
                    is_early and "choose another name" in str(error)
                ):
                    self._unexpected(process, error)
            await asyncio.sleep(self.random.uniform(0.2, 2.0))

    def _is_over(self) -> bool:
        return (
            self._finished.done()
            or self.controller is None
            or self.controller._progress.is_over
        )

    def _unexpected(self, process: Process, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self.violations.append(f"{process.name} ended: {type(error).__name__}: {error}")

    async def _keep_trainer(self) -> None:
        while not self._finished.done():
            process = self.spawn(f"trainer/{self._number()}")
            trainer = self.trainer = process.run(self._trainer, process.name)
            try:
                await self._life(process, run_blocking(trainer.run))
            except (RunFailed, controller_client.ControllerLost, RuntimeError) as error:
                self.note(f"{process.name}: {error}")
                if not self._is_over() and not self._may_end(trainer, str(error)):
                    self._unexpected(process, error)
            except Exception as error:  # noqa: BLE001 - what a process ends with
                self._unexpected(process, error)
            await asyncio.sleep(self.random.uniform(0.2, 2.0))

    def _may_end(self, trainer: SimulatedTrainer, text: str) -> bool:
        """Whether the trainer may have to start again from its checkpoint, for this cause."""
        if trainer.client._stop_reason is not None:
            return True
        if "another trainer has taken over" in text:
            return self.fired["second trainer"] > 0
        if "was removed, and there is a checkpoint" in text:
            # The other trainer made it while this one had lost its connections.
            return self.shape.removes and self.fired["second trainer"] > 0
        return "the run calls the trainer's version" in text and self.shape.noise

    def _trainer(self, name: str) -> SimulatedTrainer:
        trainer = self.trainers[name] = SimulatedTrainer(
            self.config,
            name,
            self.wire,
            self.truth,
            seed=f"{self.seed}/{name}",
            alive=self.is_alive,
            checkpoint_every=self.shape.checkpoint_every,
            noise=self.shape.noise,
        )
        return trainer

    # The run.

    async def _main(self) -> None:
        self._keepers = [
            asyncio.ensure_future(self._keep_controller()),
            *(
                asyncio.ensure_future(self._keep_server(i))
                for i in range(self.shape.servers)
            ),
            asyncio.ensure_future(self._keep_trainer()),
        ]
        if self.shape.has_client:
            self._keepers.append(asyncio.ensure_future(self._keep_client()))
        strike = asyncio.ensure_future(self._strike())
        last_s = max((fault.at_s for fault in self.faults), default=0.0)
        try:
            async with asyncio.timeout(last_s + LIMIT_S):
                await asyncio.shield(self._finished)
        except TimeoutError:
            progress = (
                self.controller._progress if self.controller is not None else None
            )
            waits = "" if progress is None else progress.waiting_for
            self.violations.append(f"the run stands still, waiting for {waits}")
        for task in (*self._keepers, strike):
            task.cancel()
            if task.done() and not task.cancelled() and task.exception() is not None:
                self.violations.append(f"the rig failed: {task.exception()!r}")

    async def _strike(self) -> None:
        for fault in self.faults:
            await asyncio.sleep(max(0.0, START_S + fault.at_s - self.loop.now_s))
            if self._is_over():
                continue
            self.note(f"fault {fault.name}")
            if getattr(self, f"fault_{fault.name}")():
                self.fired[fault.name.replace("_", " ")] += 1

    def _handler_failed(self, method: str, error: Exception) -> None:
        self.violations.append(f"{method} raised {type(error).__name__}: {error}")

    def _arrived(self, method: str, receiver: Process, data: bytes) -> None:
        if method.endswith("/Deliver") and receiver.name.startswith("server"):
            message = trajectory_pb2.DeliverResponse.FromString(data)
            for trajectory_id in message.acknowledged_ids:
                self.acknowledged.setdefault(trajectory_id, self.disk.mark())
        elif method.endswith("/ReportStored") and receiver.name == "controller":
            report = trainer_pb2.StoredReport.FromString(data)
            if not report.error:
                self.store.check(report)
        elif method.endswith("/Join") and receiver.name.startswith("server"):
            message = fleet_pb2.ControllerMessage.FromString(data)
            self.store.announced(message.prepare.stored)
            lease = message.lease
            if lease.group_id:
                server = receiver.name.partition("/")[0]
                self.leased.setdefault((lease.group_id, server), self.disk.mark())

    def run(self) -> Result:
        """Plays the schedule to its end; the folder has the run's files afterwards."""
        from simulation.oracle import judge

        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        _forget_earlier_runs()
        logging.disable(logging.NOTSET if self._verbose else logging.CRITICAL)
        if self._verbose:
            logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
            logging.getLogger().handlers[0].setFormatter(_ProcessFormatter(self.loop))
        try:
            # Killed coroutines may wait once more while they are ended; nobody is told.
            with (
                mock.patch.object(sys, "unraisablehook", lambda _: None),
                self._replaced(),
                contextlib.closing(self.loop),
            ):
                try:
                    self.loop.run_until_complete(self._main())
                except RunStuck as error:
                    self.violations.append(str(error))
                for process in self._started:
                    process.die()
                    self._bury(process)
        finally:
            logging.disable(logging.NOTSET)
        self.fired.update(self.wire.fired)
        trained = judge(self)
        trained["mixed batches"] = self.mixed_batches
        return Result(
            self.seed,
            self.violations,
            self._trace.hexdigest(),
            self.fired,
            self.loop.now_s - START_S,
            trained,
        )

    @contextlib.contextmanager
    def _replaced(self) -> Iterator[None]:
        """Puts the simulation's disk, network and workers in the place of the real ones."""

        def bind(server: SimulatedServer, address: str, credentials: object) -> int:
            server.address = address
            return 1

        def create_server(
            _: object, run_id: str, refusals: Refusals
        ) -> SimulatedServer:
            return SimulatedServer(self.network)

        def open_channel(address: str, _: object) -> SimulatedChannel:
            return SimulatedChannel(self.network, address)

        def open_blocking_channel(address: str, _: object) -> BlockingChannel:
            return BlockingChannel(self.network, address)

        def encode(trajectory: Trajectory) -> bytes:
            if self.lies_now("foreign run"):
                trajectory = replace(trajectory, run_id="other-1")
            else:
                self.finished_episodes.add(trajectory)
            return encode_trajectory(trajectory)

        take_batch = LeaseBook.take_batch
        reassign = LeaseBook.reassign
        add_server = Fleet.add

        def take_and_judge(book: LeaseBook, choice: BatchChoice[Group]) -> list[Group]:
            self._judge_shares(book, choice)
            return take_batch(book, choice)

        def check_and_reassign(
            book: LeaseBook, group: Group, holder: ServerKey
        ) -> None:
            self.finished_episodes.check(group)
            reassign(book, group, holder)

        def add_and_note(fleet: Fleet, session: ServerSession) -> None:
            self.finished_episodes.joined(session.key)
            add_server(fleet, session)

        put = grpc.GrpcSender.put
        run_group = dispatcher.Dispatcher._run_group

        async def put_or_lose(sender: Any, name: str, data: bytes, **how: Any) -> None:
            """Counts a trajectory that is lost as sent."""
            if self.lies_now("lost delivery"):
                sender._sent.add(name, how["tokens"])
                sender.taken.add(name, how["tokens"])
                self.finished_episodes.lose(TrajectoryId(name))
            else:
                await put(sender, name, data, **how)

        async def run_or_keep(own: dispatcher.Dispatcher, group: Any) -> None:
            if self.lies_now("kept lease"):
                await group.cancelled.wait()
            await run_group(own, group)

        seams: list[tuple[Any, str, Any]] = [
            (dispatcher, "encode_trajectory", encode),
            (dispatcher.Dispatcher, "_run_group", run_or_keep),
            (grpc.GrpcSender, "put", put_or_lose),
            (LeaseBook, "take_batch", take_and_judge),
            (LeaseBook, "reassign", check_and_reassign),
            (Fleet, "add", add_and_note),
            (application, "create_server", create_server),
            (application, "bind", bind),
            (application, "Journal", OwnedJournal),
            (service, "open_channel", open_channel),
            (client, "open_channel", open_channel),
            (client, "answer_commands", answer_often),
            (controller_client, "open_blocking_channel", open_blocking_channel),
            (controller_client, "threading", THREADING),
            (activity, "threading", THREADING),
            (time, "sleep", sleep),
            (redis, "RedisSender", self.queue.sender),
            (redis_receiver, "RedisReceiver", self.queue.receiver),
            (environments, "EnvironmentWorker", SimulatedWorker),
            *self.store.seams(),
            # Facts of the machine, which the product reads again and again.
            (metadata, "version", _package_version),
            (EpochCounters, "resident_bytes", lambda _: 0),
            (session, "host_id", lambda: "host"),
            (
                fleet_service,
                "describe_setup",
                lambda *_, **named: status_pb2.Setup(**named),
            ),
            (session, "is_cpu_build", lambda: True),
            # A run of seconds writes several snapshots, from which its controllers start again.
            (snapshots, "EVERY_LINES", 12),
            (snapshots, "LOOK_S", 0.2),
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, value in seams:
                stack.enter_context(mock.patch.object(owner, name, value))
            stack.enter_context(virtual_time(self.loop, self.seed))
            stack.enter_context(self.disk.replaces_fsync())
            yield

    def _judge_shares(self, book: LeaseBook, choice: BatchChoice[Group]) -> None:
        """Compares a batch with what each environment is owed by the records so far."""
        assert self.controller is not None
        books = self.controller.books
        served = {"served": 1.0} if self.shape.has_client else {}
        moment = Moment(
            groups=[
                MixedGroup(
                    group.group_id,
                    group.environment,
                    group.deadline_step,
                    group.is_complete,
                    None if group.holder is None else group.holder.server_id,
                )
                for group in book.training_groups()
            ],
            step=book.step,
            groups_per_step=book.groups_per_step,
            weights={"e": 1.0, "f": self.shape.second_weight} | served,
            owed=books.state.owed,
            ended=books.state.ended_groups,
            working_servers=frozenset(s.key.server_id for s in books.fleet.serving()),
        )
        named = {group.group_id for group in choice.groups}
        batch = [group for group in moment.groups if group.group_id in named]
        self.violations += share_faults(moment, batch)
        if self.shape.second is not None:
            by_name = Counter(group.environment for group in batch)
            self.mixed_batches += len(by_name) > 1

    # Faults. Each returns whether it could happen.

    def _some_server(self) -> Process | None:
        names = [f"server{i}" for i in range(self.shape.servers)]
        processes = [self.processes[n] for n in names if n in self.processes]
        alive = [process for process in processes if process.is_alive]
        return self.random.choice(alive) if alive else None

    def _some_caller(self) -> Process | None:
        """A server, the trainer or the client: whatever calls the controller."""
        names_left = [name for name in ("trainer", "client") if name in self.processes]
        return self.random.choice(
            (self._some_server(), *map(self.processes.get, names_left))
        )

    def _later(self, call: Callable[[], None], least_s: float, most_s: float) -> None:
        self.loop.call_later(self.random.uniform(least_s, most_s), call)

    def fault_kill_controller(self) -> bool:
        return self.kill("controller", half_open_s=self.random.choice((0.0, 8.0)))

    def fault_power_failure(self) -> bool:
        return self.kill("controller", power_fails=True)

    def fault_kill_at_sync(self) -> bool:
        """The power fails in the middle of a sync, perhaps of a disk that was slow before."""
        self.disk.kill_at = self.random.randint(1, 12)
        self.loop.thread_s = self.random.choice((0.004, 1.0))
        return False

    def fault_kill_server(self) -> bool:
        process = self._some_server()
        half_open_s = self.random.choice((0.0, 8.0))
        return process is not None and self.kill(
            process.name.partition("/")[0], half_open_s=half_open_s
        )

    def fault_kill_trainer(self) -> bool:
        return self.kill("trainer", half_open_s=self.random.choice((0.0, 8.0)))

    def fault_kill_client(self) -> bool:
        return self.kill("client", half_open_s=self.random.choice((0.0, 8.0)))

    def fault_bad_client(self) -> bool:
        """A client answers late, or twice."""
        self.habits.answer_s = self.random.choice((0.1, 8.0))
        self.habits.repeated = 0.5
        self._later(lambda: vars(self.habits).update(vars(Habits())), 1.0, 10.0)
        return self.shape.has_client

    def fault_terminated_trainer(self) -> bool:
        """The trainer gets SIGTERM; its run fails, and the same command resumes it."""
        process = self.processes.get("trainer")
        if process is None or not process.is_alive:
            return False
        process.run(self.trainer.client.stop, controller_client.TERMINATED)
        return True

    def fault_stopped_process(self) -> bool:
        process = self.random.choice(
            (self.processes.get("controller"), self._some_caller())
        )
        if process is None or not process.is_alive or process.held is not None:
            return False
        process.stop(self.random.uniform(0.2, 12.0))
        return True

    def fault_second_trainer(self) -> bool:
        """A trainer is started while an earlier one lives, which has lost its connections."""
        process = self.processes.get("trainer")
        if process is None:
            return False
        self.network.reset(process, half_open_s=self.random.choice((0.0, 6.0)))
        self._keepers.append(asyncio.ensure_future(self._keep_trainer()))
        return True

    def fault_lost_connections(self) -> bool:
        process = self._some_caller()
        if process is None:
            return False
        self.network.reset(process, half_open_s=self.random.choice((0.0, 6.0)))
        return True

    def fault_partition(self) -> bool:
        """Nothing passes to the controller, from it, or both."""
        process = self._some_caller()
        if process is None:
            return False
        ways = [(process.name, "controller"), ("controller", process.name)]
        self.network.cut |= set(self.random.choice((ways, ways[:1], ways[1:])))
        self._later(self.network.heal, 0.5, 10.0)
        return True

    def fault_slow_network(self) -> bool:
        self.network.delay_s = self.random.uniform(0.1, 1.5)
        self._later(lambda: setattr(self.network, "delay_s", 0.02), 1.0, 10.0)
        return True

    def fault_slow_disk(self) -> bool:
        self.loop.thread_s = self.random.uniform(0.1, 2.0)
        self._later(lambda: setattr(self.loop, "thread_s", 0.004), 1.0, 10.0)
        return True

    def fault_slow_queue(self) -> bool:
        """The controller reads so slowly that a backlog grows."""
        self.queue.read_s = self.random.uniform(0.5, 2.0)
        self._later(lambda: setattr(self.queue, "read_s", 0.002), 1.0, 10.0)
        return self.shape.has_queue

    def fault_full_disk(self) -> bool:
        self.disk.is_full = True
        self._later(lambda: setattr(self.disk, "is_full", False), 0.5, 6.0)
        return True

    def fault_torn_bucket(self) -> bool:
        return self._plan_load("torn bucket")

    def fault_failed_load(self) -> bool:
        return self._plan_load("failed load")

    def fault_misloaded_weights(self) -> bool:
        return self._plan_load("misloaded weights")

    def _plan_load(self, kind: str) -> bool:
        process = self._some_server()
        if process is not None:
            self.wire.planned[kind, process.name] = self.random.randint(1, 2)
        return False

    def fault_lost_weights(self) -> bool:
        """The way of weights is cut, that of orders is not."""
        self.wire.cut = True
        self._later(lambda: setattr(self.wire, "cut", False), 0.5, 8.0)
        return True

    def fault_slow_storage(self) -> bool:
        """Calls of the storage may take longer than its deadline."""
        return self._storage_fault("delay_s", self.random.uniform(2.0, 12.0), 0.2)

    def fault_failing_storage(self) -> bool:
        return self._storage_fault("failing", self.random.choice((0.2, 0.7)), 0.0)

    def fault_torn_storage(self) -> bool:
        return self._storage_fault("torn", self.random.choice((0.2, 0.7)), 0.0)

    def fault_late_storage(self) -> bool:
        return self._storage_fault("late_s", self.random.uniform(0.5, 5.0), 0.0)

    def fault_full_storage(self) -> bool:
        return self._storage_fault("is_full", 1.0, 0.0)

    def _storage_fault(self, name: str, value: float, after: float) -> bool:
        setattr(self.store, name, value)
        self._later(lambda: setattr(self.store, name, after), 1.0, 8.0)
        # The store counts the others when they happen.
        return name == "delay_s"

    def lies_now(self, lie: str) -> bool:
        """Whether the running server tells this lie about its next trajectory."""
        key = (lie, PROCESS.get())
        if not self.lies[key]:
            return False
        self.lies[key] -= 1
        self.fired[f"told {lie}"] += 1
        return True

    def _lie(self, lie: str) -> bool:
        process = self._some_server()
        if process is not None:
            self.lies[lie, process] = self.random.randint(1, 3)
        return process is not None

    def fault_foreign_run_lie(self) -> bool:
        """A server delivers under the id of another run."""
        return self._lie("foreign run")

    def fault_lost_delivery_lie(self) -> bool:
        """What a server has sent never arrives, and its lease is closed as finished."""
        return self._lie("lost delivery")

    def fault_kept_lease_lie(self) -> bool:
        """A server keeps a lease and beats, and no episode of it ends before it is cancelled."""
        return self._lie("kept lease")

    def fault_slow_server(self) -> bool:
        process = self._some_server()
        for engine in self.engines:
            if engine.process is process:
                engine.token_s = self.random.uniform(0.5, 3.0)
                self._later(
                    lambda engine=engine: setattr(engine, "token_s", 0.1), 2.0, 20.0
                )
                return True
        return False

    def fault_failing_environment(self) -> bool:
        for gateway in self.gateways:
            gateway.failing = 0.3
        self._later(
            lambda: [setattr(g, "failing", 0.0) for g in self.gateways], 0.5, 5.0
        )
        return True

    def fault_drain(self) -> bool:
        process = self._some_server()
        stop = self.stops.get(process.name) if process is not None else None
        if stop is None:
            return False
        process.run(stop.set)
        return True


_RUNS = itertools.count()


def _forget_earlier_runs() -> None:
    """Collects only between runs: it ends generators at a moment that no seed chooses.

    The collector never looks again at what was there before the first run, and after it.
    """
    number = next(_RUNS)
    gc.disable()
    if number % RUNS_KEPT == 1:
        gc.collect()
    if number < 2:
        gc.freeze()


def shared_memory() -> str | None:
    """A folder of a file system in memory; None if this machine has none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class _ProcessFormatter(logging.Formatter):
    """Puts the virtual time and the process before each line."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__("%(message)s")
        self._loop = loop

    def format(self, record: logging.LogRecord) -> str:
        process = PROCESS.get()
        name = "rig" if process is None else process.name
        return f"{self._loop.now_s:.6f} {name}: {super().format(record)}"
