"""What one controller carries: a real one, with servers and a trainer that take no own time.

    python benchmarks/controller_load.py --servers 1 8 128 512
    python benchmarks/controller_load.py --servers 256 --groups-per-step 256 --max-staleness 1
    python benchmarks/controller_load.py --servers 8 --tokens 8 8 --seconds 120     # memory

Each row is one run. Servers deliver as fast as they are leased, the trainer reports at once, every
step is published to all. `--checkout` measures the controllers of other checkouts too. Consumes:
leases and orders. Waits for: the controller. Unblocked by: it, or `--seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import numpy as np
import tomli_w
from measure import table
from slipstream.core.types import (
    GroupId,
    PolicyVersion,
    Purpose,
    ServerId,
    Status,
    Trajectory,
    VersionSpan,
)
from slipstream.protocol.access.security import Credentials, open_channel
from slipstream.protocol.codec import TRAINER_EPOCH, trajectory_to_pb
from slipstream.protocol.queue.seal import seal
from slipstream.protocol.weights.buckets import TensorSpec, layout_to_pb
from slipstream.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    trajectory_pb2,
    trajectory_pb2_grpc,
    weights_pb2,
)

ROOT = Path(__file__).resolve().parents[1]
OPEN = Credentials(None, None, None, None)
QUEUE_BYTES = 64 << 30
DIGESTS = [bytes([number]) * 16 for number in range(16)]
LAYOUT = layout_to_pb([TensorSpec(f"w{n}", "float32", (4, 4)) for n in range(16)], 64)
METRICS = {f"metric_{number}": float(number) for number in range(60)}
SAMPLE_S = 0.5
START_LIMIT_S = 120.0
# The protocol from which on a controller expects `KeepPlace` of its trainer.
KEEPS_PLACE = 3


@dataclass
class Seen:
    """What the fleet and the trainer have seen of the controller."""

    delivered: int = 0
    steps: int = 0
    first_step_s: float = 0.0
    status_s: list[float] = field(default_factory=list)
    # Trajectories, steps, bytes and processor seconds of the controller, again and again.
    samples: list[tuple[float, int, int, int, float]] = field(default_factory=list)
    lost: int = 0
    # Times at which the trainer reported its steps.
    ends_s: list[float] = field(default_factory=list)


def template(tokens: tuple[int, int], name: str, epoch: int) -> trajectory_pb2.Trajectory:
    """A trajectory of a server, with texts and metrics as real ones have them."""
    prompt, reply = tokens
    return trajectory_to_pb(
        Trajectory(
            run_id="",
            group_id=GroupId("g"),
            member=0,
            attempt=0,
            server_id=ServerId(name),
            server_epoch=epoch,
            environment="e",
            task_index=0,
            seed=0,
            purpose=Purpose.TRAINING,
            status=Status.COMPLETED,
            token_ids=np.arange(prompt + reply, dtype=np.uint32),
            run_lengths=(prompt, reply),
            behavior_logprobs=np.full(reply, -1.0, np.float32),
            version_spans=(VersionSpan(reply, PolicyVersion(0, 0)),),
            reward=0.5,
            metrics={"right": 1.0, "well_formed": 1.0},
            prompt_text="x" * 4 * prompt,
            reply_text="y" * 4 * reply,
        )
    )


class Server:
    """A rollout server without an engine."""

    max_episodes = 64

    def __init__(
        self, address: str, number: int, *, protocol: int, tokens: tuple[int, int], seen: Seen
    ) -> None:
        self._address, self._name, self._epoch = address, f"s{number:04d}", number + 1
        # Controllers before protocol 3 send no key, and take trajectories as they are.
        self._protocol, self._key = protocol, b""
        self._tokens, self._seen = tokens[1], seen
        self._trajectory = template(tokens, self._name, self._epoch)
        self._out: asyncio.Queue[fleet_pb2.ServerMessage] = asyncio.Queue()
        self._trajectories: asyncio.Queue[trajectory_pb2.DeliverRequest] = asyncio.Queue()
        self._generated, self._version = 0, (0, 0)

    async def run(self) -> None:
        """Joins and serves until its stream ends, which counts as lost; it does not join again."""
        try:
            await self._serve()
        except* grpc.aio.AioRpcError:
            pass
        self._seen.lost += 1

    async def _serve(self) -> None:
        async with open_channel(self._address, OPEN) as channel, asyncio.TaskGroup() as tasks:
            delivers = trajectory_pb2_grpc.TrajectoryServiceStub(channel).Deliver
            answers = delivers(self._requests(), wait_for_ready=True)
            helpers = [
                tasks.create_task(self._acknowledged(answers)),
                tasks.create_task(self._beat()),
            ]
            joins = fleet_pb2_grpc.FleetServiceStub(channel).Join
            async for message in joins(self._messages(), wait_for_ready=True):
                self._handle(message)
            for helper in helpers:
                helper.cancel()

    async def _messages(self) -> AsyncIterator[fleet_pb2.ServerMessage]:
        hello = fleet_pb2.ServerHello(
            server_id=self._name,
            server_epoch=self._epoch,
            protocol_version=self._protocol,
            max_episodes=self.max_episodes,
            engine_workers=1,
            max_model_len=1 << 20,
            queue_bytes=QUEUE_BYTES,
        )
        yield fleet_pb2.ServerMessage(hello=hello)
        while True:
            yield await self._out.get()

    async def _requests(self) -> AsyncIterator[trajectory_pb2.DeliverRequest]:
        while True:
            yield await self._trajectories.get()

    @staticmethod
    async def _acknowledged(answers: AsyncIterator[trajectory_pb2.DeliverResponse]) -> None:
        async for _ in answers:
            pass

    async def _beat(self) -> None:
        while True:
            now = time.time()
            report = fleet_pb2.ServerReport(
                generated_tokens=self._generated,
                ended_tokens=self._generated,
                busy_intervals=[fleet_pb2.BusyInterval(start_s=now - SAMPLE_S, end_s=now)],
            )
            self._out.put_nowait(fleet_pb2.ServerMessage(heartbeat=report))
            await asyncio.sleep(SAMPLE_S)

    def _handle(self, message: fleet_pb2.ControllerMessage) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                self._trajectory.run_id = message.welcome.run_id
                self._key = message.welcome.delivery_key
            case "environment":
                name = message.environment.spec.name
                report = fleet_pb2.EnvironmentReport(environment=name, num_tasks=1000)
                self._out.put_nowait(fleet_pb2.ServerMessage(environment=report))
            case "lease":
                self._run(message.lease)
            case "prepare":
                self._say(message.prepare.publish_id, fleet_pb2.PUBLISH_PHASE_READY)
            case "receive":
                publish_id = message.receive.order.publish_id
                self._say(publish_id, fleet_pb2.PUBLISH_PHASE_LOADED, bucket_digests=DIGESTS)
            case "commit":
                version = message.commit.version
                self._version = version.incarnation, version.step
                self._say(
                    message.commit.publish_id,
                    fleet_pb2.PUBLISH_PHASE_SERVING,
                    probe_logprobs=message.commit.probe.expected_logprobs,
                )

    def _say(self, publish_id: str, phase: fleet_pb2.PublishPhase, **fields: object) -> None:
        report = fleet_pb2.PublishReport(publish_id=publish_id, phase=phase, **fields)  # type: ignore[arg-type]
        self._out.put_nowait(fleet_pb2.ServerMessage(publish=report))

    def _run(self, lease: fleet_pb2.Lease) -> None:
        message = self._trajectory
        message.group_id, message.task_index, message.seed = (
            lease.group_id,
            lease.task_index,
            lease.seed,
        )
        message.attempt = lease.first_attempt
        span = message.version_spans[0]
        span.version.incarnation, span.version.step = self._version
        for member in lease.members:
            self._deliver(message, member, lease.first_attempt)
        self._close(lease.group_id)

    def _deliver(self, message: trajectory_pb2.Trajectory, member: int, attempt: int) -> None:
        message.member = member
        name = f"{message.group_id}.{member}.{attempt}.{self._epoch:x}"
        message.reward = (member * 7919 + message.task_index) % 100 / 100
        data = message.SerializeToString()
        sealed = seal(self._key, name, data) if self._key else data  # type: ignore[arg-type]
        self._trajectories.put_nowait(
            trajectory_pb2.DeliverRequest(trajectory=sealed, trajectory_id=name)
        )
        self._generated += self._tokens
        self._seen.delivered += 1

    def _close(self, group_id: str) -> None:
        report = fleet_pb2.LeaseReport(group_id=group_id, closed=True)
        self._out.put_nowait(fleet_pb2.ServerMessage(lease=report))


async def train(
    address: str, seen: Seen, *, protocol: int, training_s: float = 0.0, publish_s: float = 0.0
) -> None:
    """A trainer that makes and sends every version in these times, until it is told to stop."""
    async with open_channel(address, OPEN) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        hello = trainer_pb2.TrainerHello(world_size=1, layout_description="on 1 rank")
        welcome = await stub.Register(hello, wait_for_ready=True)
        epoch = ((TRAINER_EPOCH, str(welcome.trainer_epoch)),)
        if protocol >= KEEPS_PLACE:
            place = stub.KeepPlace(trainer_pb2.PlaceRequest(), metadata=epoch)
            await place.read()
        version, communicator_id = 0, ""
        while True:
            request = trainer_pb2.NextRequest(
                version=trajectory_pb2.PolicyVersion(step=version),
                communicator_id=communicator_id,
                bucket_digests=DIGESTS,
            )
            orders = [d async for d in stub.Next(request, metadata=epoch)]
            match orders[0].WhichOneof("directive"):
                case "batch":
                    batch = orders[0].batch
                    await asyncio.sleep(training_s)
                    version = batch.step + 1
                    report = trainer_pb2.StepReport(
                        step=batch.step,
                        batch_id=batch.batch_id,
                        version=trajectory_pb2.PolicyVersion(step=version),
                        weight_digest=version.to_bytes(16, "big"),
                        metrics=METRICS,
                        wall_s=0.001,
                    )
                    await stub.ReportStep(report, metadata=epoch)
                    seen.first_step_s = seen.first_step_s or time.monotonic()
                    seen.steps += 1
                    seen.ends_s.append(time.monotonic())
                case "publish":
                    order = orders[0].publish
                    if not order.begun:
                        start = trainer_pb2.PublishStart(
                            publish_id=order.publish_id,
                            layout=LAYOUT,
                            communicator=order.communicator,
                        )
                        await stub.StartPublish(start, metadata=epoch)
                    probe = weights_pb2.Probe(
                        token_ids=np.arange(4, dtype="<u4").tobytes(),
                        lengths=[4],
                        expected_logprobs=np.full(3, -2.0, "<f4").tobytes(),
                        tolerance=1e-3,
                    )
                    await asyncio.sleep(publish_s)
                    result = trainer_pb2.PublishResult(
                        publish_id=order.publish_id,
                        bucket_digests=DIGESTS,
                        probe=probe if order.verify else None,
                    )
                    receipt = await stub.FinishPublish(result, metadata=epoch)
                    dropped = receipt.discard_communicator
                    communicator_id = "" if dropped else order.communicator.communicator_id
                case "stop":
                    await stub.Finish(trainer_pb2.TrainerGoodbye(), metadata=epoch)
                    return


async def watch(address: str, pid: int, seen: Seen) -> None:
    """Asks for the status, and samples what the controller has taken, until it is cancelled."""
    async with open_channel(address, OPEN) as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        while True:
            started_s = time.monotonic()
            await stub.GetStatus(status_pb2.GetStatusRequest(), wait_for_ready=True)
            now_s = time.monotonic()
            if seen.first_step_s:
                seen.status_s.append(now_s - started_s)
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            cpu_s = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
            rss = pages * os.sysconf("SC_PAGE_SIZE")
            seen.samples.append((now_s, seen.delivered, seen.steps, rss, cpu_s))
            await asyncio.sleep(SAMPLE_S)


def row(name: str, servers: int, arguments: argparse.Namespace, seen: Seen) -> list[str]:
    """Rates from the first step on; the slope of the memory over the second half."""
    samples = [s for s in seen.samples if seen.first_step_s and s[0] >= seen.first_step_s]
    shape = f"{servers}, {arguments.groups_per_step or 16}, {arguments.max_staleness}"
    if len(samples) < 4:
        return [name, shape, "0", "0", "", "", "", "", str(seen.lost)]
    first, last = samples[0], samples[-1]
    middle = samples[len(samples) // 2 :]
    wall_s, made, steps = (last[i] - first[i] for i in (0, 1, 2))
    slope = np.polyfit([s[1] for s in middle], [s[3] for s in middle], 1)[0]
    status_ms = sorted(1000 * s for s in seen.status_s)
    return [
        name,
        shape,
        f"{made / wall_s:,.0f}",
        f"{steps / wall_s:.2f}",
        f"{(last[4] - first[4]) / wall_s:.2f}",
        f"{1000 * (last[4] - first[4]) / max(made, 1):.2f}",
        f"{status_ms[len(status_ms) // 2]:.0f}, {status_ms[-1]:.0f}",
        f"{last[3] / 1e6:.0f}, {slope:+.0f}",
        str(seen.lost),
    ]


def protocol_of(checkout: Path) -> int:
    """The protocol version that the controller of a checkout speaks."""
    text = (checkout / "protos/slipstream/protocol/codec.py").read_text()
    found = re.search(r"^PROTOCOL_VERSION = (\d+)$", text, re.MULTILINE)
    assert found is not None, f"{checkout} names no PROTOCOL_VERSION"
    return int(found[1])


async def measure(
    name: str, checkout: Path, servers: int, arguments: argparse.Namespace
) -> list[str]:
    """One run with `servers` rollout servers."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        if not arguments.port:
            probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{arguments.port or probe.getsockname()[1]}"
        probe.close()
        config = {
            "run": {"name": "load", "steps": 10**6, "dir": folder},
            "model": {"path": "nowhere"},
            "algorithm": {
                "group_size": 16,
                "groups_per_step": arguments.groups_per_step or 16,
                "max_staleness": arguments.max_staleness,
                "learning_rate": 1e-3,
            },
            "sampling": {"max_reply_tokens": 512, "max_episode_tokens": 1024},
            "queue": {"max_bytes": QUEUE_BYTES},
            "controller": {"address": address, "heartbeat_s": SAMPLE_S},
            "environments": [{"name": "e", "reference": "m:E"}],
        }
        path = Path(folder) / "config.toml"
        path.write_text(tomli_w.dumps(config))
        roots = [str(checkout / part) for part in ("protos", "client", "rollout_server", "learner")]
        controller = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "slipstream.learner.controller", "--config", str(path)),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
            stderr=asyncio.subprocess.DEVNULL,
        )
        seen, tokens = Seen(), (arguments.tokens[0], arguments.tokens[1])
        protocol = protocol_of(checkout)
        fleet = [
            Server(address, number, protocol=protocol, tokens=tokens, seen=seen)
            for number in range(servers)
        ]
        tasks = [asyncio.create_task(server.run()) for server in fleet]
        tasks.append(asyncio.create_task(train(address, seen, protocol=protocol)))
        tasks.append(asyncio.create_task(watch(address, controller.pid, seen)))
        try:
            until_s = time.monotonic() + START_LIMIT_S
            while not seen.first_step_s and time.monotonic() < until_s:
                await asyncio.sleep(0.1)
                if tasks[-1].done() or tasks[-2].done():
                    # The trainer, or the probe of the status.
                    await asyncio.gather(*tasks[-2:])
            if seen.first_step_s:
                await asyncio.sleep(arguments.seconds)
            return row(name, servers, arguments, seen)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            controller.kill()
            await controller.wait()


def main() -> None:
    """Prints one row a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 8, 128, 512])
    parser.add_argument("--groups-per-step", type=int, default=16)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs=2, default=[64, 512])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--checkout", type=Path, nargs="+", default=[], help="older versions, measured before ours"
    )
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    rows = []
    for servers in arguments.servers:
        for checkout in (*arguments.checkout, ROOT):
            name = "ours" if checkout is ROOT else checkout.name
            rows.append(asyncio.run(measure(name, checkout, servers, arguments)))
            print(rows[-1], flush=True)
    heads = ["", "servers, B, η", "trajectories/s", "steps/s", "cores", "ms a trajectory"]
    heads += ["status ms: median, max", "RSS MB, bytes a trajectory", "servers lost"]
    print("\n".join(table(heads, rows)))


if __name__ == "__main__":
    main()
