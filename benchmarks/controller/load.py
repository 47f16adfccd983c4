"""Measures what one controller takes for each trajectory, with servers that take no time.

PYTHONPATH=tests:deploy python -m benchmarks.controller.load --servers 8 64 256 512 1024
PYTHONPATH=tests:deploy python -m benchmarks.controller.load --servers 8 --joining 500

Each row is one run. Servers deliver as fast as they are leased, the trainer reports at once, every
step is published to all. The claim is processor time of the controller: the generator shares the
machine. Waits for: the controller. Unblocked by: it, or `--seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from slipstream.core.configuration.config_file import dump_config
from slipstream.core.types import (
    GroupId,
    PolicyVersion,
    RoutedExperts,
    ServerId,
    TrajectoryId,
)
from slipstream.protocol.access.run_token import make_run_token, run_credentials
from slipstream.protocol.access.security import Credentials
from slipstream.protocol.codec import trajectory_to_pb
from slipstream.protocol.queue.base import seal
from slipstream.v1 import fleet_pb2, status_pb2, status_pb2_grpc, trainer_pb2, trajectory_pb2
from support.fakes.fake_server import LAYOUT, FakeServer, bucket_digests
from support.fakes.fake_trainer import FakeTrainer
from support.fakes.named_channel import OPEN, open_named
from support.fakes.plain_trajectory import plain_trajectory
from support.rigs.controller_runs import make_config
from support.rigs.waiting import until

from benchmarks.common.measure import table

HEARTBEAT_S = 0.5
QUEUE_BYTES = 64 << 30
METRICS = {f"metric_{number}": float(number) for number in range(60)}
DIGESTS = bucket_digests(LAYOUT)


def processor_s(pid: int) -> float:
    """Returns the processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class LoadServer(FakeServer):
    """A server that answers a lease at once with prepared trajectories."""

    def __init__(
        self,
        address: str,
        number: int,
        tokens: tuple[int, int],
        *,
        routed_experts: RoutedExperts | None = None,
    ) -> None:
        super().__init__(address, f"s{number:04d}", epoch=number + 1, queue_bytes=QUEUE_BYTES)
        prompt, self.reply_tokens = tokens
        self.digests = DIGESTS
        self.num_delivered = 0
        self.heartbeat_s = HEARTBEAT_S
        self.template = trajectory_to_pb(
            plain_trajectory(
                range(sum(tokens)),
                tokens,
                run_id="",
                group_id=GroupId("g"),
                server_id=ServerId(self.name),
                server_epoch=self.epoch,
                environment="e",
                reward=0.5,
                metrics={"right": 1.0, "well_formed": 1.0},
                prompt_text="x" * 4 * prompt,
                reply_text="y" * 4 * self.reply_tokens,
                routed_experts=routed_experts,
            )
        )

    async def _beat(self) -> None:
        while True:
            self.outbox.put_nowait(fleet_pb2.ServerMessage(heartbeat=self.report()))
            await asyncio.sleep(self.heartbeat_s)

    async def _handle(self, message: fleet_pb2.ControllerMessage) -> None:
        match message.WhichOneof("message"):
            case "lease":
                await self._answer(message.lease)
            case "receive":
                name = message.receive.order.publish_id
                loaded = fleet_pb2.PUBLISH_PHASE_LOADED
                await self._say(name, loaded, bucket_digests=DIGESTS)
            case kind:
                if kind == "welcome":
                    self.heartbeat_s = message.welcome.heartbeat_s
                await super()._handle(message)

    async def _answer(self, lease: fleet_pb2.Lease) -> None:
        assert self.version is not None
        made = self.template
        made.run_id = self.run_id
        made.group_id = lease.group_id
        made.task_index = lease.task_index
        made.seed = lease.seed
        made.attempt = lease.first_attempt
        version = made.version_spans[0].version
        version.incarnation, version.step = self.version
        for member in lease.members:
            made.member = member
            made.reward = (member * 7919 + lease.task_index) % 100 / 100
            name = TrajectoryId(f"{lease.group_id}.{member}.{made.attempt}.{self.epoch:x}")
            sealed = seal(self.delivery_key, name, made.SerializeToString())
            self.generated += self.reply_tokens
            self.ended += self.reply_tokens
            self.num_ended += 1
            self.num_delivered += 1
            await self.sender.put(name, sealed, timeout_s=60, tokens=self.reply_tokens)
        closed = fleet_pb2.LeaseReport(group_id=lease.group_id, closed=True)
        self.outbox.put_nowait(fleet_pb2.ServerMessage(lease=closed))


class LoadTrainer(FakeTrainer):
    """A trainer that reports a step without reading its batch."""

    async def _follow(self, directives: list[trainer_pb2.Directive]) -> None:
        batch = directives[0].batch
        if directives[0].WhichOneof("directive") != "batch":
            await super()._follow(directives)
            return
        self.version = PolicyVersion(self.version.incarnation, batch.step + 1)
        self.digest = self.version.step.to_bytes(16, "big")
        report = trainer_pb2.StepReport(
            step=batch.step,
            batch_id=batch.batch_id,
            version=trajectory_pb2.PolicyVersion(step=self.version.step),
            weight_digest=self.digest,
            metrics=METRICS,
            wall_s=0.001,
        )
        await self.report(report)


class Probe:
    """Asks for the status again and again, and samples the controller's memory."""

    def __init__(
        self,
        address: str,
        pid: int,
        fleet: list[LoadServer],
        credentials: Credentials = OPEN,
    ) -> None:
        self._address = address
        self._credentials = credentials
        self._pid = pid
        self._fleet = fleet
        self.answers_s: list[float] = []
        # Trajectories, resident bytes and processor seconds of the controller, and the time.
        self.samples: list[tuple[int, int, float, float]] = []

    async def run(self) -> None:
        async with open_named(self._address, credentials=self._credentials) as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)
            while True:
                began_s = time.monotonic()
                await stub.GetStatus(status_pb2.GetStatusRequest(), wait_for_ready=True)
                self.answers_s.append(time.monotonic() - began_s)
                self.sample()
                await asyncio.sleep(HEARTBEAT_S)

    def sample(self) -> None:
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        made = sum(server.num_delivered for server in self._fleet)
        resident = pages * os.sysconf("SC_PAGE_SIZE")
        self.samples.append((made, resident, processor_s(self._pid), time.monotonic()))


async def measure(servers: int, asked: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(
            Path(folder),
            run__steps=10**6,
            algorithm__group_size=16,
            algorithm__groups_per_step=asked.groups_per_step,
            algorithm__max_staleness=asked.max_staleness,
            sampling__max_reply_tokens=512,
            sampling__max_episode_tokens=1024,
            queue__max_bytes=QUEUE_BYTES,
            controller__heartbeat_timeout_s=10 * HEARTBEAT_S,
        )
        config.run_dir.mkdir()
        path = config.run_dir / "config.toml"
        path.write_text(dump_config(config))
        make_run_token(config)
        controller = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "slipstream.learner.controller",
            "--config",
            str(path),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        if asked.pid_file is not None:
            asked.pid_file.write_text(str(controller.pid))
        address = config.controller.address
        tokens = (asked.tokens[0], asked.tokens[1])
        fleet = [LoadServer(address, n, tokens) for n in range(servers + asked.joining)]
        trainer = LoadTrainer(address)
        credentials = run_credentials(config)
        for peer in (trainer, *fleet):
            peer.credentials = credentials
        probe = Probe(address, controller.pid, fleet, credentials)
        peers = [trainer, probe, *fleet[:servers]]
        tasks = [asyncio.ensure_future(peer.run()) for peer in peers]
        try:
            # A part that ended before the second step shows its error.
            await until(lambda: trainer.version.step >= 2 or any(map(asyncio.Future.done, tasks)))
            assert trainer.version.step >= 2, [task.exception() for task in tasks if task.done()]
            probe.answers_s.clear()
            probe.samples.clear()
            probe.sample()
            steps = trainer.version.step
            joined = ""
            if asked.joining:
                began_s = time.monotonic()
                before_s = processor_s(controller.pid)
                newcomers = fleet[servers:]
                tasks += [asyncio.ensure_future(server.run()) for server in newcomers]
                await until(lambda: all(s.delivery_key for s in newcomers))
                took_s = time.monotonic() - began_s
                cost_s = processor_s(controller.pid) - before_s
                joined = f"{asked.joining} joined in {took_s:.1f} s ({cost_s:.2f} s)"
            await asyncio.sleep(asked.seconds)
            probe.sample()
            lost = sum(task.done() for task in tasks)
            return row(probe, f"{servers}, {asked.groups_per_step}, {asked.max_staleness}") + [
                f"{(trainer.version.step - steps)}",
                f"{lost} {joined}",
            ]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            controller.kill()
            await controller.wait()


def row(probe: Probe, shape: str) -> list[str]:
    """The cells of one run; the slope of memory is that of the second half."""
    first = probe.samples[0]
    last = probe.samples[-1]
    made = last[0] - first[0]
    cpu_s = last[2] - first[2]
    wall_s = last[3] - first[3]
    half = probe.samples[len(probe.samples) // 2 :]
    slope = np.polyfit([s[0] for s in half], [s[1] for s in half], 1)[0] if made else 0.0
    answers_ms = sorted(1000 * answer_s for answer_s in probe.answers_s)
    return [
        shape,
        f"{1000 * cpu_s / max(made, 1):.2f}",
        f"{made / wall_s:,.0f}",
        f"{cpu_s / wall_s:.2f}",
        f"{answers_ms[len(answers_ms) // 2]:.0f}, {answers_ms[-1]:.0f}" if answers_ms else "",
        f"{last[1] / 1e6:.0f}",
        f"{slope:+.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 64, 256, 512, 1024])
    parser.add_argument("--joining", type=int, default=0, help="servers that join the busy run")
    parser.add_argument("--groups-per-step", type=int, default=16)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs=2, default=[64, 512])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--pid-file", type=Path, help="gets the controller's process, to profile it"
    )
    asked = parser.parse_args()
    rows = []
    for servers in asked.servers:
        rows.append(asyncio.run(measure(servers, asked)))
        print(rows[-1], flush=True)
    heads = ["servers, groups a step, max_staleness", "ms of processor a trajectory"]
    heads += ["trajectories/s", "cores", "status ms: median, max", "RSS MB", "bytes a trajectory"]
    print("\n".join(table([*heads, "steps", "peers lost"], rows)))


if __name__ == "__main__":
    main()
