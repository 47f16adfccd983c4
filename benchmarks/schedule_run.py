"""The real controller beside its simulation: servers and a trainer that take scripted times.

    python benchmarks/schedule_run.py --staleness 1 2 4 8 --slower 4
    python benchmarks/schedule_run.py --staleness 1 2 --checkout PATH     # an older controller too

The lengths and speeds are those of benchmarks/schedules.py, `--slower` times as slow, so that the
machine's own delays count less. Consumes: leases and orders. Waits for: the controller. Unblocked
by: it, or a limit of a minute for each step.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import tomli_w
from controller_load import QUEUE_BYTES, ROOT, Seen, Server, protocol_of, train
from measure import RESULTS, progress, settings_of, table, write_result
from schedule_simulation import WARMUP_STEPS, Machines, Schedule, Simulation, Work, lognormal
from slipstream.client.launch.preflight import free_port
from slipstream.v1 import fleet_pb2, trajectory_pb2

STEP_LIMIT_S = 60.0


class TimedServer(Server):
    """A rollout server whose engine only counts: its step takes as long as `machines` say."""

    def __init__(
        self, address: str, machines: Machines, groups: Sequence[Sequence[int]], seen: Seen
    ) -> None:
        super().__init__(address, 0, protocol=protocol_of(ROOT), tokens=(8, 8), seen=seen)
        self.max_episodes = machines.max_episodes
        self._machines, self._groups = machines, groups
        # Remaining tokens of each running reply, by group and member; messages by group.
        self._remaining: dict[tuple[str, int], float] = {}
        self._messages_of: dict[str, trajectory_pb2.Trajectory] = {}
        self._changed = asyncio.Event()
        self._is_paused = False

    async def _beat(self) -> None:
        engine = asyncio.create_task(self._decode())
        try:
            await super()._beat()
        finally:
            engine.cancel()

    def _handle(self, message: fleet_pb2.ControllerMessage) -> None:
        kind = message.WhichOneof("message")
        if kind in ("receive", "commit"):
            self._is_paused = kind == "receive"
            self._changed.set()
        super()._handle(message)

    def _run(self, lease: fleet_pb2.Lease) -> None:
        message = trajectory_pb2.Trajectory()
        message.CopyFrom(self._trajectory)
        message.group_id, message.task_index = lease.group_id, lease.task_index
        message.seed, message.attempt = lease.seed, lease.first_attempt
        span = message.version_spans[0]
        span.version.incarnation, span.version.step = self._version
        self._messages_of[lease.group_id] = message
        lengths = self._groups[int(lease.group_id.removeprefix("g"))]
        for member in lease.members:
            self._remaining[lease.group_id, member] = float(lengths[member])
        self._changed.set()

    async def _decode(self) -> None:
        while True:
            self._changed.clear()
            names, started_s = list(self._remaining), time.monotonic()
            step_s = self._machines.decoding_s(len(names))
            idle = self._is_paused or not names
            wait_s = None if idle else step_s * min(self._remaining.values())
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            if idle:
                continue
            tokens = (time.monotonic() - started_s) / step_s
            for name in names:
                self._remaining[name] -= tokens
                if self._remaining[name] <= 0:
                    self._end(*name)

    def _end(self, group_id: str, member: int) -> None:
        del self._remaining[group_id, member]
        message = self._messages_of[group_id]
        self._deliver(message, member, message.attempt)
        if not any(running == group_id for running, _ in self._remaining):
            del self._messages_of[group_id]
            self._close(group_id)


async def measure(checkout: Path, machines: Machines, work: Work, steps: int) -> float:
    """Returns the seconds of a step of a run with the controller of `checkout`."""
    seen = Seen()
    with tempfile.TemporaryDirectory() as folder:
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        config = {
            "run": {"name": "schedule", "steps": 10**6, "dir": folder},
            "model": {"path": "nowhere"},
            "algorithm": {
                "group_size": len(work.groups[0]),
                "groups_per_step": work.groups_per_step,
                "max_staleness": work.max_staleness,
                "learning_rate": 1e-3,
            },
            "sampling": {"max_reply_tokens": 512, "max_episode_tokens": 1024},
            "queue": {"max_bytes": QUEUE_BYTES},
            "controller": {"address": address, "heartbeat_timeout_s": STEP_LIMIT_S},
            "environments": [{"name": "e", "reference": "m:E"}],
        }
        path = Path(folder) / "config.toml"
        path.write_text(tomli_w.dumps(config))
        roots = [
            str(checkout / part)
            for part in ("protos", "core", "client", "environments", "rollout_server", "learner")
        ]
        controller = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "slipstream.learner.controller", "--config", str(path)),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
            stderr=asyncio.subprocess.DEVNULL,
        )
        trainer = train(
            address,
            seen,
            protocol=protocol_of(checkout),
            training_s=machines.training_s,
            publish_s=machines.publish_s,
        )
        server = TimedServer(address, machines, work.groups, seen)
        tasks = [asyncio.create_task(server.run()), asyncio.create_task(trainer)]
        try:
            async with asyncio.timeout(STEP_LIMIT_S * steps):
                while len(seen.ends_s) < steps and not any(task.done() for task in tasks):
                    await asyncio.sleep(0.05)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            controller.kill()
            await controller.wait()
    counted = seen.ends_s[WARMUP_STEPS:]
    return (counted[-1] - counted[0]) / (len(counted) - 1)


def main() -> None:
    """Prints one row for each bound and seed, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--slower", type=float, default=4.0)
    parser.add_argument("--checkout", type=Path, help="an older version, measured too")
    parser.add_argument("--out", type=Path, default=RESULTS / "schedule_run.json")
    arguments = parser.parse_args()
    machines = Machines()
    times = {f.name: getattr(machines, f.name) for f in dataclasses.fields(machines)}
    slow = {name: arguments.slower * value for name, value in times.items() if name.endswith("_s")}
    slowed = dataclasses.replace(machines, **slow)
    rows: list[list[object]] = []
    for seed in arguments.seeds:
        for bound in arguments.staleness:
            groups, expected = lognormal(8 * (arguments.steps + 4 * (bound + 1)), seed, by_task=0.5)
            work = Work(groups, expected, 8, bound)
            for checkout, fresh in ((arguments.checkout, "never"), (ROOT, "measured")):
                if checkout is None:
                    continue
                schedule = Schedule(fresh=fresh)  # type: ignore[arg-type]
                simulated_s = Simulation(machines, work, schedule).run(arguments.steps).step_s
                real_s = asyncio.run(measure(checkout, slowed, work, arguments.steps))
                real_s /= arguments.slower
                name = "ours" if checkout == ROOT else "before"
                cells = (f"{real_s:.3f}", f"{simulated_s:.3f}", f"{simulated_s / real_s:.2f}")
                rows.append([bound, seed, name, *cells])
                progress(f"{rows[-1]}")
    header = ["max_staleness", "seed", "controller", "s/step, real", "simulated", "ratio"]
    lines = table(header, rows)
    record = {"settings": settings_of(arguments), "results": rows, "table": lines}
    write_result("schedule_run", record, arguments.out)
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
